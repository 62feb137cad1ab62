"""What an optimizer step is given and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gspo.experts import ExpertPicks
from gspo.logprobs import TokenLogProbs
from gspo.packing import PackedBatch

LossFn = Callable[[PackedBatch, TokenLogProbs], Tensor]
"""A micro-batch's share of the loss of its mini-batch: a scalar, already divided by the mini-batch's N."""

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
