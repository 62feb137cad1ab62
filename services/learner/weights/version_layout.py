"""Where the tensors of a version lie in it, end to end, and the row of the sums of all their tiles.

Ranks that know the layout need not tell each other where anything is: a range of a version's bytes has a range of the row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
from msgspec import structs

from gspo.model.serving_layout import ServedPart
from gspo_protocol.deltas import ITEM_BYTES
from gspo_protocol.digests import sums_digest, version_digest
from gspo_protocol.messages import TensorInfo
from gspo_protocol.tiles import TILE_BYTES, Sums, num_tiles, tile_sums
from gspo_services.learner.weights.copy_memory import Bytes

_NO_DIGEST = ""


class TensorSpan(NamedTuple):
    """Bytes of one tensor: from ``begin`` to ``end`` of the version."""

    tensor: int
    """Its place among the tensors."""
    begin: int
    end: int


class VersionLayout:
    """The tensors of a version without their values."""

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        """``tensors``: end to end; their digests do not matter."""
        self.tensors = [structs.replace(each, digest=_NO_DIGEST) for each in tensors]
        self._offsets = [each.offset for each in tensors]
        self._tiles = list(accumulate((num_tiles(each.num_bytes) for each in tensors), initial=0))
        self.num_bytes = tensors[-1].offset + tensors[-1].num_bytes if tensors else 0

    @classmethod
    def of(cls, parts: Iterable[tuple[ServedPart, str]]) -> Self:
        """Lay tensors out one after the other. ``parts``: each with its dtype; where it begins in a parameter is ignored."""
        tensors: list[TensorInfo] = []
        offset = 0
        for part, dtype in parts:
            size = part.num_elements * ITEM_BYTES[dtype]
            tensors.append(TensorInfo(part.name, dtype, list(part.shape), offset, size, _NO_DIGEST))  # type: ignore[arg-type]
            offset += size
        return cls(tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionLayout) and self.tensors == other.tensors

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_tiles(self) -> int:
        """The length of the row."""
        return self._tiles[-1]

    def touched(self, begin: int, end: int) -> Iterator[TensorSpan]:
        """Yield the tensors that have bytes from ``begin`` to ``end``, in order."""
        at = bisect_right(self._offsets, begin) - 1
        while begin < end:
            info = self.tensors[at]
            last = min(end, info.offset + info.num_bytes)
            if begin < last:
                yield TensorSpan(at, begin, last)
                begin = last
            at += 1

    def row(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of the row that has the tiles touched by these bytes; they are at least one."""
        return self._tile(begin), self._tile(end - 1) + 1

    def place(self, touched: TensorSpan) -> tuple[int, int]:
        """Return the same of bytes of one tensor."""
        first, offset = self._tiles[touched.tensor], self._offsets[touched.tensor]
        return first + (touched.begin - offset) // TILE_BYTES, first + num_tiles(touched.end - offset)

    def _tile(self, place: int) -> int:
        at = bisect_right(self._offsets, place) - 1
        return self._tiles[at] + (place - self._offsets[at]) // TILE_BYTES

    def sums(self, begin: int, data: Bytes) -> Sums:
        """Sum bytes of a version, from ``begin`` on: uint64 [the tiles that they touch]."""
        found: list[Sums] = []
        run = begin
        for tensor, _, end in self.touched(begin, begin + len(data)):
            info = self.tensors[tensor]
            # Tensors that end with a tile are summed at once: experts are thousands.
            if end == begin + len(data) or info.num_bytes % TILE_BYTES or end < info.offset + info.num_bytes:
                lead = (run - self._offsets[bisect_right(self._offsets, run) - 1]) % TILE_BYTES
                found.append(tile_sums(data[run - begin : end - begin].data, lead))
                run = end
        return np.concatenate(found) if found else np.empty(0, dtype=np.uint64)

    def digest(self, row: Sums) -> str:
        """Return the digest of the version with this row of sums."""
        return version_digest(self.described(row))

    def described(self, row: Sums) -> list[TensorInfo]:
        """Return the tensors with the digests that they have when this is the row of their sums."""
        return [
            structs.replace(info, digest=sums_digest(row[first:last], info.num_bytes))
            for info, first, last in zip(self.tensors, self._tiles[:-1], self._tiles[1:], strict=True)
        ]
