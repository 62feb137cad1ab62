"""The boundaries of a packed row's segments, with the tensors that layers make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import torch
from torch import Tensor


class PaddedRows(NamedTuple):
    """The tokens of a packed row as S rows of L places, L the length of the longest segment."""

    places_SL: Tensor
    """int64; the token of the packed row; its last one where there is none."""
    is_token_SL: Tensor
    """bool"""
    slots_T: Tensor
    """int64; where each token of the packed row is, counted through the rows."""


class Boundaries(Sequence[int]):
    """[S + 1] ends of the segments, from 0 on, for one pass of a model.

    A tensor of them is made once for each device, not in each layer: copied from the host, it makes the host wait for all
    that the device has to do before.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = tuple(ends)
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._rows: dict[torch.device, PaddedRows] = {}

    @classmethod
    def of(cls, ends: Sequence[int]) -> Boundaries:
        """``ends`` itself, if it is one of these."""
        return ends if isinstance(ends, cls) else cls(ends)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._ends[index]

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(end - start for start, end in pairwise(self._ends))

    def on(self, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
        """[S + 1]"""
        if (device, dtype) not in self._on:
            self._on[device, dtype] = torch.tensor(self._ends, dtype=dtype, device=device)
        return self._on[device, dtype]

    def rows(self, device: torch.device) -> PaddedRows:
        """Return the rows that these segments make."""
        if device not in self._rows:
            self._rows[device] = self._made(device)
        return self._rows[device]

    def _made(self, device: torch.device) -> PaddedRows:
        bounds, length = self.on(device, torch.int64), self.longest
        starts_S = bounds[:-1]
        columns_L = torch.arange(length, device=device)
        is_token_SL = columns_L < bounds.diff()[:, None]
        places_SL = torch.where(is_token_SL, starts_S[:, None] + columns_L, bounds[-1] - 1)
        tokens_T = torch.arange(self._ends[-1], device=device)
        segments_T = torch.bucketize(tokens_T, bounds[1:], right=True)
        return PaddedRows(places_SL, is_token_SL, segments_T * length + tokens_T - starts_S[segments_T])
