"""Sums of tiles (``gspo_protocol.tiles``) on any device, of any part of a tensor: at the learner, and in an engine."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_protocol.tiles import HALF_FACTORS, TILE_BYTES, TILE_WORDS, WORD_FACTORS, num_tiles

_WORD_BYTES: Final = 8
_HOST_TILES: Final = 32
"""So many are summed at a time on a CPU: they stay in a core's cache."""
_DEVICE_TILES: Final = 4096
"""On a GPU: 128 MiB, and twice that of temporary memory."""
_WIDENED_BYTES: Final = {"cpu": 1024 * 1024}
"""Of a rectangle, as much is widened to whole rows at a time; on a GPU 64 MiB."""


def tile_sums(values: Tensor, start_byte: int = 0) -> tuple[int, Tensor]:
    """Sum a part of a tensor: the first tile that it touches, and int64 [tiles that it touches], on its device.

    Sums of parts that share a tile add up, with wrapping. The host does not wait for the device.
    Args:
        values: [any], contiguous, of any type: the part's elements.
        start_byte: where they begin in the tensor.
    """
    data = values.detach().reshape(-1).view(torch.uint8)
    first, lead = divmod(start_byte, TILE_BYTES)
    ahead = min(len(data), TILE_BYTES - lead) if lead else 0
    whole = (len(data) - ahead) // TILE_BYTES * TILE_BYTES
    found = [_padded(data[:ahead], lead)] if ahead else []
    if whole:
        found.append(_whole(data[ahead : ahead + whole]))
    if ahead + whole < len(data):
        found.append(_padded(data[ahead + whole :], 0))
    return first, torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=data.device)


def rectangle_sums(data: Tensor, row_bytes: int, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Sum a rectangle of a tensor: int64 [the tiles from that of its first row to that of its last].

    Args:
        data: uint8 [rows x columns of the rectangle], contiguous.
        row_bytes: of the whole tensor.
        rows: the first row of the rectangle, and the one after its last.
        columns: the same in bytes of a row.
    """
    if columns == (0, row_bytes):
        return tile_sums(data, rows[0] * row_bytes)[1]
    begin = rows[0] * row_bytes // TILE_BYTES
    found = torch.zeros(num_tiles(rows[1] * row_bytes) - begin, dtype=torch.int64, device=data.device)
    table = data.view(rows[1] - rows[0], columns[1] - columns[0])
    step = max(1, _WIDENED_BYTES.get(data.device.type, 64 * 1024 * 1024) // row_bytes)
    for first in range(0, len(table), step):
        part = table[first : first + step]
        widened = torch.zeros(len(part), row_bytes, dtype=torch.uint8, device=data.device)
        widened[:, columns[0] : columns[1]] = part
        tile, sums = tile_sums(widened, (rows[0] + first) * row_bytes)
        found[tile - begin : tile - begin + len(sums)] += sums
    return found


def _padded(data: Tensor, lead: int) -> Tensor:
    return _whole(pad(data, (lead, TILE_BYTES - lead - len(data))))


def _whole(data: Tensor) -> Tensor:
    """uint8 [tiles x TILE_BYTES]."""
    if data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    words = data.view(torch.int64).view(-1, TILE_WORDS)
    factors, half_factors = _factors(data.device)
    step = _HOST_TILES if data.device.type == "cpu" else _DEVICE_TILES
    sums = torch.empty(len(words), dtype=torch.int64, device=data.device)
    for begin in range(0, len(words), step):
        part = words[begin : begin + step]
        # Without its sign, which the shift has spread.
        halves = (part >> 32).bitwise_and_(0xFFFFFFFF)
        if data.device.type == "cpu":
            torch.add(torch.mv(part, factors), torch.mv(halves, half_factors), out=sums[begin : begin + step])
        else:  # No GPU multiplies matrices of integers.
            torch.sum(halves.mul_(half_factors).addcmul_(part, factors), dim=1, out=sums[begin : begin + step])
    return sums


@cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = (torch.from_numpy(each.view("<i8").copy()).to(device) for each in (WORD_FACTORS, HALF_FACTORS))
    return first, second
