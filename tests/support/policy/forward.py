"""The learner's forward pass over a packed row."""

from __future__ import annotations

from typing import Any

import torch

from gspo.model.logprobs import TokenLogProbs
from gspo.model.packing import PackedBatch


def logprobs_of(model: Any, packed: PackedBatch) -> TokenLogProbs:
    """Log-probs under a prepared policy (gspo.model.policy), without gradient and without entropy."""
    with torch.no_grad():
        result: TokenLogProbs = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            cu_seqlens=packed.cu_seqlens,
            targets_T=packed.targets_T,
            temperatures_T=packed.temperatures_T,
            with_entropy=False,
        )
    return result
