"""Sums of tiles in torch are those of the protocol, for any type and any part."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.tiles import TILE_BYTES
from gspo_protocol.tiles import tile_sums as by_definition
from gspo_services.shared.torch_tiles import rectangle_sums, tile_sums


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


@given(st.integers(1, 40), st.integers(1, 40_000), st.data())
def test_rectangles_add_up_to_the_whole(rows: int, row_bytes: int, data: st.DataObject) -> None:
    whole = torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8))
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, row_bytes))
    expected = by_definition(whole.numpy().tobytes())
    found = torch.zeros(len(expected), dtype=torch.int64)
    for first, last in ((0, row), (row, rows)):
        for left, right in ((0, column), (column, row_bytes)):
            if first < last and left < right:
                part = whole[first:last, left:right].contiguous().view(-1)
                sums = rectangle_sums(part, row_bytes, (first, last), (left, right))
                begin = first * row_bytes // TILE_BYTES
                found[begin : begin + len(sums)] += sums
    assert np.array_equal(found.numpy().view(np.uint64), expected)
