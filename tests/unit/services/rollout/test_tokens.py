"""Arrays that grow, and runs, compared with lists of one value per token."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_services.rollout.tokens import Runs, TokenArrays


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=300), max_size=6))
def test_all_that_was_appended_is_there_in_order(pieces: list[list[int]]) -> None:
    tokens = TokenArrays()
    for piece in pieces:
        ids = np.array(piece, dtype=np.int32)
        tokens.append(ids, -ids.astype(np.float32))
    expected = [token for piece in pieces for token in piece]
    assert len(tokens) == len(expected)
    assert (tokens.token_ids.dtype, tokens.logprobs.dtype) == (np.int32, np.float32)
    assert tokens.token_ids.tolist() == expected
    np.testing.assert_array_equal(tokens.logprobs, -np.array(expected, dtype=np.float32))


def test_what_was_read_cannot_be_changed_and_does_not_change() -> None:
    tokens = TokenArrays()
    tokens.append(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32))
    before = tokens.token_ids
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 9
    for _ in range(10):
        tokens.append(np.full(100, 7, dtype=np.int32), np.ones(100, dtype=np.float32))
    assert before.tolist() == [0, 1, 2]
    assert tokens.token_ids.tolist() == [0, 1, 2, *[7] * 1000]
    assert tokens.logprobs.tolist() == [0.0, 0.0, 0.0, *[1.0] * 1000]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=12), st.data())
def test_runs_are_the_values_token_by_token(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    runs = Runs[int]()
    values = []
    for value, num_tokens in pieces:
        runs.append(value, num_tokens)
        values += [value] * num_tokens
    begin = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(begin, len(values)))
    assert runs.between(begin, end) == [(value, len(list(run))) for value, run in groupby(values[begin:end])]
    assert len(runs) == len(list(groupby(values)))
    assert [value for value, first, after in runs for _ in range(first, after)] == values
