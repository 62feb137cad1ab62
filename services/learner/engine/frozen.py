"""Frozen models that score the policy's tokens: the reference, which is the run's start model, and the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.model.beginnings import can_share
from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.model.policy import load_policy, prepare_policy
from gspo.model.sequence_parallel import RowShare
from gspo_services.learner.engine.forward import model_inputs
from gspo_services.learner.engine.partitioned_loading import AgreedWhole


class FrozenModel:
    """A model on one rank, without gradient, in the learner's dtype.

    It is whole on every rank, whatever the ZeRO stage and the offload: parameters x bytes of the dtype each.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        logprob_chunk_tokens: int,
        float32_head: bool = False,
        fused_head: bool = True,
    ) -> None:
        """Take a model that nothing else uses, and change it in place."""
        prepare_policy(model, logprob_chunk_tokens=logprob_chunk_tokens, float32_head=float32_head, fused_head=fused_head)
        self._model = model.requires_grad_(False).to(device).eval()
        self._can_share = can_share(model.config.to_dict())

    @classmethod
    def load(cls, model_dir: Path, dtype: torch.dtype, device: torch.device, **head: Any) -> FrozenModel:
        """Load it from its directory, on all ranks. Collective.

        Raises: ValueError, on all ranks, when the directory does not hold the model.
        """
        return cls(load_policy(model_dir, dtype, AgreedWhole(device)), device, **head)

    def move(self, device: torch.device) -> None:
        """Keep it on another device from now on. ``logprobs`` needs that of the packed batches."""
        self._model = self._model.to(device)

    def logprobs(self, packed: PackedBatch, share: RowShare | None = None) -> Tensor:
        """float32 [T]: log-probs of a micro-batch's targets at their temperatures. Collective only with a ``share``."""
        if not self._can_share:
            packed = replace(packed, shared=None)
        with torch.no_grad():
            result: TokenLogProbs = self._model(**model_inputs(packed, share))
        return (result if share is None else share.whole(result, packed.input_ids.shape[1])).logprobs_T
