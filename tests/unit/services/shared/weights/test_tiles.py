"""SGLang's hash on CUDA, kept as sums that changed words correct."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.shared.weights.tiles import TileSums, Work

TILE = 32_768
BIG = 2 * 2**20 + 40_000
"""More than is hashed at a time, and an unfinished tile."""


def some_bytes(number: int, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, number, dtype=np.uint8).tobytes())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0, 1, 4, 32_768, 32_770, BIG]), st.integers(0, 2**32), st.lists(st.integers(0, BIG), max_size=5))
def test_the_checksum_does_not_depend_on_how_the_bytes_are_cut(number: int, seed: int, cuts: list[int]) -> None:
    data = some_bytes(number, seed)
    ends = [0, *sorted(min(cut, number) for cut in cuts), number]
    parts = [data[begin:end] for begin, end in pairwise(ends)]
    assert TileSums(parts).checksum() == TileSums([data]).checksum()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([4, 7, 32_770, BIG]), st.lists(st.integers(0, BIG), max_size=20), st.integers(0, BIG), st.integers(0, 9)
)
def test_changed_words_correct_the_sums(number: int, places: list[int], cut: int, seed: int) -> None:
    old = some_bytes(number, seed)
    new = bytearray(old)
    for place in places:
        new[place % number] ^= 1 + place % 255
    sums = TileSums([old])
    middle = cut % number // 4 * 4
    sums.change(0, old[:middle], new[:middle])
    sums.change(middle, old[middle:], new[middle:])
    assert sums.checksum() == TileSums([new]).checksum()
    assert (sums.checksum() == TileSums([old]).checksum()) == (old == new)


@pytest.mark.parametrize("begin", [0, 5 * TILE, 5 * TILE + 4, BIG - TILE])
@pytest.mark.parametrize("changed", [0.001, 0.9])
def test_parts_of_the_work_done_in_any_order_have_the_same_result(begin: int, changed: float) -> None:
    rng = np.random.default_rng(begin)
    number = 2 * BIG + 2
    old = rng.integers(0, 256, number, dtype=np.uint8)
    new = old.copy()
    new[begin:] += (rng.random(number - begin) < changed).astype(np.uint8)
    work: list[Work] = []
    sums = TileSums([old[:begin].data, old[begin:].data], do=work.extend)
    shuffled(work, rng)
    assert sums.checksum() == TileSums([old.data]).checksum()
    middle = begin + (number - begin) // 8 * 4
    changes = [*sums.changes(begin, old[begin:middle].data, new[begin:middle].data)]
    changes += sums.changes(middle, old[middle:].data, new[middle:].data)
    assert len(changes) > 2
    shuffled(changes, rng)
    assert sums.checksum() == TileSums([new.data]).checksum()


def shuffled(work: list[Work], rng: np.random.Generator) -> None:
    for place in rng.permutation(len(work)):
        work[place]()


@pytest.mark.parametrize(("begin", "end"), [(2, 6), (4, 6)])
def test_a_change_that_begins_or_ends_within_a_word_is_refused(begin: int, end: int) -> None:
    data = some_bytes(12, 0)
    with pytest.raises(ValueError, match=f"bytes {begin} to {end} of 12"):
        TileSums([data]).change(begin, data[begin:end], data[begin:end])
