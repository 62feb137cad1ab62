"""Sums of the tiles of a version's tensors, of which each rank adds those of the elements that it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gspo.model.serving_layout import ServedPart
from gspo_protocol.digests import sums_digest, version_digest
from gspo_protocol.messages import TensorInfo
from gspo_protocol.tiles import num_tiles
from gspo_services.learner.weights.weight_copy import DTYPE_NAMES
from gspo_services.shared.torch_tiles import tile_sums


class PartSums:
    """The sums of all tensors of a version, in the order of their names, as one row; zeros where nothing was added."""

    def __init__(self, tensors: Iterable[ServedPart], dtype: torch.dtype) -> None:
        """``dtype``: in which they are served."""
        self._dtype = dtype
        self._tensors = {part.name: part for part in sorted(tensors, key=lambda part: part.name)}
        self._firsts: dict[str, int] = {}
        number = 0
        for name, part in self._tensors.items():
            self._firsts[name] = number
            number += num_tiles(part.num_elements * dtype.itemsize)
        self.row = torch.zeros(number, dtype=torch.int64)
        """int64 [tiles of all tensors]: rows of ranks add up, and wrap."""

    def add(self, places: Iterable[ServedPart], start: int, values: Tensor) -> None:
        """Add the elements ``values`` of a parameter, from its element ``start`` on, whose tensors are at ``places``."""
        end = start + len(values)
        for part in places:
            first, last = max(start, part.start), min(end, part.start + part.num_elements)
            if first < last:
                served = values[first - start : last - start].to(self._dtype)
                tile, sums = tile_sums(served, (first - part.start) * self._dtype.itemsize)
                begin = self._firsts[part.name] + tile
                self.row[begin : begin + len(sums)] += sums.cpu()

    def digest(self) -> str:
        """Return the digest of the version, once everything was added."""
        return version_digest(self._infos())

    def _infos(self) -> Iterator[TensorInfo]:
        row = self.row.numpy().view("u8")
        for name, part in self._tensors.items():
            num_bytes = part.num_elements * self._dtype.itemsize
            first = self._firsts[name]
            digest = sums_digest(row[first : first + num_tiles(num_bytes)], num_bytes)
            yield TensorInfo(name, DTYPE_NAMES[self._dtype], list(part.shape), 0, num_bytes, digest)  # type: ignore[arg-type]
