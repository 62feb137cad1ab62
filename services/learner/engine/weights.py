"""The weights of an engine: as inference engines load them, as a checkpoint has them, and their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gspo.model.serving import lora_weights, served_parameters, serving_weights
from gspo.model.serving_layout import ServedParameter, ServingLayout
from gspo_services.learner.checkpoints import BaseDigest, streamed_digest
from gspo_services.learner.engine.expert_parallel import ExpertShare, gathered
from gspo_services.learner.engine.own_ranges import PublishedRanges
from gspo_services.shared.weights import PEFT_PREFIX

Broadcast = Callable[[Tensor], Tensor]
"""Rank 0's tensor on every rank. Collective."""


class EngineWeights:
    """The weights of one model, whose parameters may be partitioned, or be shared by ranks. All methods are collective."""

    def __init__(self, model: Any, shares: Mapping[int, ExpertShare], *, rank: int, num_ranks: int, has_lora: bool) -> None:
        self._model = model
        self._shares = shares
        self._rank = rank
        self._num_ranks = num_ranks
        self._emit = rank == 0
        self._has_lora = has_lora
        self._layout = ServingLayout(model)

    def served(self, dtype: torch.dtype | None = None) -> Iterator[ServedParameter]:
        """All weights, adapters merged: see ``gspo.model.serving.served_parameters``."""
        return served_parameters(self._model, gathered=self._gathered, emit=self._emit, dtype=dtype, layout=self._layout)

    def own(self, dtype: torch.dtype) -> PublishedRanges:
        """This rank's ranges of what ``served`` has."""
        return PublishedRanges(
            self._model, self._shares, self._layout, dtype,
            rank=self._rank, num_ranks=self._num_ranks, gathered=self._gathered,
        )  # fmt: skip

    def base(self, dtype: torch.dtype | None = None) -> Iterator[ServedParameter]:
        """All weights as they are without adapters."""
        return served_parameters(
            self._model, gathered=self._gathered, emit=self._emit, dtype=dtype, with_adapters=False, layout=self._layout
        )

    def adapters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        """The adapters' matrices under the names of peft's files, in the type in which they are served."""
        matrices = lora_weights(self._model, gathered=self._gathered, emit=self._emit)
        return (ServedParameter.alone(PEFT_PREFIX + name, matrix.to(dtype)) for name, matrix in matrices)

    def trained(self) -> Iterator[ServedParameter]:
        """What a checkpoint has of the weights: all as they are served, or the adapters' matrices alone."""
        if not self._has_lora:
            return self.served()
        matrices = lora_weights(self._model, gathered=self._gathered, emit=self._emit)
        return (ServedParameter.alone(name, matrix) for name, matrix in matrices)

    def digest(self, broadcast: Broadcast) -> str:
        """Hexadecimal digest of ``trained``, in any layout; the same on every rank."""
        return _shared(self.local_digest(), broadcast)

    def local_digest(self) -> bytes:
        """``digest`` as bytes, right on rank 0 alone. The other ranks get the digest of nothing."""
        return streamed_digest(pair for each in self.trained() for pair in each.tensors())

    def base_digest(self, broadcast: Broadcast) -> str:
        """Hexadecimal digest of the model below the adapters; the same on every rank. Empty without adapters."""
        if not self._has_lora:
            return ""
        base = BaseDigest()
        base.add_all(
            serving_weights(self._model, gathered=self._gathered, emit=self._emit, with_adapters=False, layout=self._layout)
        )
        return _shared(base.digest(), broadcast)

    def _gathered(self, value: Tensor) -> AbstractContextManager[Tensor | None]:
        return gathered(value, self._shares)


def _shared(digest: bytes, broadcast: Broadcast) -> str:
    return bytes(broadcast(torch.tensor(list(digest), dtype=torch.uint8)).tolist()).hex()
