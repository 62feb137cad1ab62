"""Sums of tiles in torch are those of the protocol, for any type and any part."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.tiles import TILE_BYTES
from gspo_protocol.tiles import tile_sums as by_definition
from gspo_services.learner.weights.tile_sums import tile_sums


def bytes_of(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("number", [0, 1, 3, TILE_BYTES // 2, TILE_BYTES // 2 + 1, 40 * TILE_BYTES + 3])
def test_a_whole_tensor_has_the_sums_of_the_protocol(dtype: torch.dtype, number: int) -> None:
    values = torch.randint(-(2**15), 2**15, (number * dtype.itemsize // 2,), dtype=torch.int16).view(dtype)
    first, sums = tile_sums(values)
    assert first == 0
    assert np.array_equal(sums.numpy().view(np.uint64), by_definition(bytes_of(values)))


@given(st.integers(1, 3 * TILE_BYTES // 2), st.lists(st.integers(1, 3 * TILE_BYTES // 2), max_size=3), st.integers(0, 2**32))
def test_parts_add_up_to_the_whole(number: int, cuts: list[int], seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**16, number, dtype=np.uint16)
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    expected = by_definition(bits.tobytes())
    found = torch.zeros(len(expected), dtype=torch.int64)
    ends = sorted({0, number, *(cut for cut in cuts if cut < number)})
    for begin, end in pairwise(ends):
        first, sums = tile_sums(values[begin:end], 2 * begin)
        found[first : first + len(sums)] += sums
    assert np.array_equal(found.numpy().view(np.uint64), expected)
