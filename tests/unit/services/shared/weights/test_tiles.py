"""SGLang's hash on CUDA."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.shared.weights.tiles import tiled_checksum

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
    assert tiled_checksum(parts) == tiled_checksum([data])
