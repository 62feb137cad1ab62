"""Experts of sampled tokens: their bytes, which rows belong to which tokens, and messages with and without them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages.experts import (
    UNKNOWN,
    ModelExperts,
    decode_experts,
    encode_experts,
    highest_expert,
    joined_experts,
    sampled_between,
)
from gspo_protocol.messages.pieces import KINDS
from tests.support.builders import a_chunk, a_publication, token_arrays


@pytest.mark.parametrize(("num_experts", "size"), [(8, 1), (255, 1), (256, 2), (512, 2)])
def test_experts_survive_their_bytes_and_the_largest_is_not_taken_for_an_unknown_one(num_experts: int, size: int) -> None:
    indices = np.array([[[0, num_experts - 1]], [[UNKNOWN, UNKNOWN]]])
    encoded = encode_experts(indices, num_experts)
    assert (encoded.dtype, encoded.shape) == (np.uint8, (2, 1, 2, size))
    np.testing.assert_array_equal(decode_experts(encoded), indices)


@pytest.mark.parametrize(
    ("indices", "num_experts", "error"),
    [
        (np.zeros((1, 2, 3)) + 8, 8, "experts 8 to 8: the model has 0 to 7"),
        (np.zeros((1, 2, 3)) - 2, 8, "experts -2 to -2: the model has 0 to 7"),
        (np.zeros((1, 128, 9)), 8, r"\[1, 128, 9\] choices among 8 experts: .* at most 1024 bytes a token"),
        (np.zeros((1, 2)), 8, r"\[1, 2\] choices among 8 experts"),
    ],
)
def test_experts_that_no_model_or_message_has_are_refused(indices: np.ndarray, num_experts: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        encode_experts(indices.astype(np.int32), num_experts)


@pytest.mark.parametrize("num_experts", [8, 255, 256, 512])
def test_the_highest_expert_is_found_and_an_unknown_one_is_none(num_experts: int) -> None:
    indices = np.array([[[0, num_experts - 1]], [[UNKNOWN, UNKNOWN]]])
    assert highest_expert(encode_experts(indices, num_experts)) == num_experts - 1
    assert highest_expert(encode_experts(indices[1:], num_experts)) == UNKNOWN
    assert highest_expert(np.full((1, 1, 1, 2), 255, np.uint8) - np.uint8([1, 0])) == 2**16 - 2


def test_a_version_says_what_its_experts_are_like_or_is_what_it_was_before_it_could() -> None:
    """A broker of an older release knows no such field."""
    told = replace(a_publication(), experts=ModelExperts(48, 8, 128))
    assert decode(encode(told)).message == told
    assert b"experts" not in bytes(encode(a_publication())[0])
    assert decode(encode(a_publication())).message.experts is None  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match=r"published: .*experts"):
        decode(encode(replace(told, experts=ModelExperts(48, 0, 128))))


SEGMENTS = st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(1, 5)), min_size=1, max_size=6)


@given(SEGMENTS, st.data())
def test_the_rows_of_a_range_of_tokens_are_those_of_its_sampled_tokens(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    is_sampled = np.repeat([KINDS[kind] != "observation" for kind, _ in rows], [number for _, number in rows])
    begin = data.draw(st.integers(0, len(is_sampled)))
    end = data.draw(st.integers(begin, len(is_sampled)))
    first, last = sampled_between(np.array(rows), begin, end)
    assert (first, last) == (is_sampled[:begin].sum(), is_sampled[:end].sum())


def test_tokens_without_experts_among_others_have_unknown_ones() -> None:
    known = encode_experts(np.array([[[3, 1]]]), 4)
    joined = joined_experts([(None, 2), (known, 1)])
    assert joined is not None
    assert decode_experts(joined).tolist() == [[[-1, -1]], [[-1, -1]], [[3, 1]]]
    assert joined_experts([(None, 2), (None, 0)]) is None
    with pytest.raises(ValueError, match=r"\[1, 2, 1\] and \[1, 3, 1\] together: the engines of this run serve different"):
        joined_experts([(known, 1), (encode_experts(np.array([[[3, 1, 0]]]), 4), 1)])


def test_a_chunk_has_one_row_of_experts_for_each_action_token_or_none_at_all() -> None:
    num_sampled = sum(each.num_tokens for each in a_chunk().segments if each.kind == "action")
    experts = encode_experts(np.arange(num_sampled * 6).reshape(num_sampled, 2, 3) % 8, 8)
    arrays = {**token_arrays(5), "experts": experts}
    received = decode(encode(a_chunk(), arrays))
    np.testing.assert_array_equal(received.arrays["experts"], experts)
    for wrong in (experts[:-1], experts[:, :, :, 0], experts[:, :0], np.repeat(experts, 3, axis=3)):
        with pytest.raises(ProtocolError, match=rf"chunk: array experts has shape .* expected \[{num_sampled}, layers"):
            decode(encode(a_chunk(), {**arrays, "experts": wrong}))
