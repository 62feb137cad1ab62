"""What an optimizer step is given and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.moe.experts import ExpertPicks

LossFn = Callable[[PackedBatch, TokenLogProbs], Tensor]
"""A micro-batch's share of the loss of its mini-batch: a scalar, already divided by the mini-batch's N. Where a log-prob is
not finite it is given 0, and the micro-batch's loss is NaN whatever the function answers. It should not read values on the
host: each reading waits for the device."""

ReplayFn = Callable[[PackedBatch], ExpertPicks | None]
"""The experts that the routers are to choose for a micro-batch; None where they choose themselves."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float
    """Over all ranks and micro-batches."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """That the step used."""
    num_tokens: int
    """Over all ranks."""


def micro_batch_loss(packed: PackedBatch, result: TokenLogProbs, loss_fn: LossFn) -> Tensor:
    """The loss of a micro-batch: NaN where a log-prob is not finite, 0 for an empty one. Never waits for the device."""
    # An empty micro-batch walks through the same collectives and adds gradients of exactly 0.
    if packed.is_empty:
        return result.logprobs_T.sum() * 0.0
    # loss_fn would raise on this rank alone and leave the others waiting; a NaN is found by all of them together, after the
    # last micro-batch. Not by a look at the values: in every micro-batch the host would wait for the device.
    sound_T = torch.isfinite(result.logprobs_T)
    loss = loss_fn(packed, result._replace(logprobs_T=torch.where(sound_T, result.logprobs_T, 0.0)))
    return torch.where((sound_T | ~packed.mask_T).all(), loss, math.nan)
