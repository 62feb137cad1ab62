"""The input and the result of an optimizer step."""

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
"""A micro-batch's share of its mini-batch's loss: a scalar, already divided by the mini-batch's N. The function receives 0
for a log-prob that is not finite, and the micro-batch's loss is then NaN whatever it returns. It should not read values on
the host: each read waits for the device."""

ReplayFn = Callable[[PackedBatch], ExpertPicks | None]
"""The experts that the routers must choose for a micro-batch; None: they choose themselves."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one optimizer step; the same on every rank."""

    loss: float
    """Sum over all ranks and micro-batches."""
    grad_norm: float
    """The norm before clipping."""
    learning_rate: float
    """The rate that the step used."""
    num_tokens: int
    """Sum over all ranks."""
    num_computed_tokens: int
    """The same, beginnings that sequences of a micro-batch have in common counted once."""


def micro_batch_loss(packed: PackedBatch, result: TokenLogProbs, loss_fn: LossFn) -> Tensor:
    """Compute the loss of a micro-batch: NaN if a log-prob is not finite, 0 for an empty one. Never waits for the device."""
    # An empty micro-batch takes part in the same collectives and adds gradients of exactly 0.
    if packed.is_empty:
        return result.logprobs_T.sum() * 0.0
    # loss_fn would raise on this rank alone and leave the others waiting. All ranks find a NaN together, after the last
    # micro-batch. The values are not read here: the host would wait for the device in every micro-batch.
    sound_T = torch.isfinite(result.logprobs_T)
    loss = loss_fn(packed, result._replace(logprobs_T=torch.where(sound_T, result.logprobs_T, 0.0)))
    return torch.where((sound_T | ~packed.mask_T).all(), loss, math.nan)
