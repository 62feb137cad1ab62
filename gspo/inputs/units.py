"""Ratio units (sequence, turn, token) and sums over segments of a flat token vector.

Shapes: ``_T`` per target token of a micro-batch, ``_S`` per sequence of it, ``_U`` per ratio unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from gspo.inputs.validation import require_ids
from gspo.settings import RatioUnit

MAX_TURN_ID = 2**31
"""Keeps the product of sequence id and this inside int64."""


@dataclass(frozen=True)
class Units:
    """The ratio unit of every token: ``ids_T`` in [0, num_units); a unit may hold no action token."""

    ids_T: Tensor
    sequence_ids_U: Tensor
    """The sequence that each unit is a part of."""

    @property
    def num_units(self) -> int:
        return self.sequence_ids_U.shape[0]


def ratio_units(ratio_unit: RatioUnit, sequence_ids_T: Tensor, turn_ids_T: Tensor | None, *, num_sequences: int) -> Units:
    """Return the unit of every token; a turn is a pair of (sequence id, turn id).

    Raises: ValueError for an unknown unit, ids out of range, or ratio unit "turn" without turn ids.
    """
    if ratio_unit == "sequence":
        return Units(sequence_ids_T, torch.arange(num_sequences, device=sequence_ids_T.device))
    if ratio_unit == "token":
        return Units(torch.arange(sequence_ids_T.shape[0], device=sequence_ids_T.device), sequence_ids_T)
    if ratio_unit != "turn":
        raise ValueError(f"ratio_unit is {ratio_unit!r}; choose one of {', '.join(get_args(RatioUnit))}")
    if turn_ids_T is None:
        raise ValueError("turn_ids_T is None with ratio_unit 'turn'; give the turn of every token")
    require_ids("turn_ids_T", turn_ids_T, MAX_TURN_ID)
    ids_T = numbered(sequence_ids_T.long() * MAX_TURN_ID + turn_ids_T.long())
    # As many units as there are tokens, most of them empty: the host would wait for the device to know how many there are.
    return Units(ids_T, torch.zeros_like(ids_T).scatter(0, ids_T, sequence_ids_T.long()))


def numbered(keys_N: Tensor) -> Tensor:
    """Return int64 [N]: the place of each key among the different ones in order, from 0. As the inverse that torch.unique
    gives, which makes the host wait for the device."""
    ordered_N, places_N = keys_N.sort()
    numbers_N = ordered_N.diff(prepend=ordered_N[:1]).ne(0).cumsum(0)
    return torch.empty_like(places_N).scatter_(0, places_N, numbers_N)


def segment_sum(values_T: Tensor, ids_T: Tensor, num_segments: int) -> Tensor:
    """Sum ``values_T`` by segment; an empty segment gives 0. The result has the dtype of the values.

    Added up in float64 and rounded once: in float32 a sum of a million equal terms is off by 1 %, and its count of tokens
    stops at 2**24. On the CPU the order of additions is that of the tokens, so the result is reproducible bit for bit; on
    CUDA that needs torch.use_deterministic_algorithms(True). Differentiable, also without any token.
    """
    zeros = values_T.new_zeros(num_segments, dtype=torch.float64)
    return zeros.index_add(0, ids_T, values_T.double()).to(values_T.dtype)


def segment_mean(values_T: Tensor, mask_T: Tensor, ids_T: Tensor, num_segments: int) -> Tensor:
    """Mean of ``values_T`` over the tokens of each segment where ``mask_T`` (bool) holds; 0 for an empty segment."""
    counts = segment_sum(mask_T.to(values_T.dtype), ids_T, num_segments)
    zero = values_T.new_zeros(())
    return segment_sum(torch.where(mask_T, values_T, zero), ids_T, num_segments) / counts.clamp(min=1)
