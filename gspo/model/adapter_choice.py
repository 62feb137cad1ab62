"""Several adapters of one model in one pass: each token is changed by its own adapter alone.

    A = [A_1; A_2; ...], B = [B_1, B_2, ...]    W x + alpha / rank * B (mask_t * A x) = W x + alpha / rank * B_a A_a x

where a is the adapter of token t, and mask_t keeps the rows of A that are its own. So one product serves all adapters,
and a token has no gradient to those of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gspo.model.lora import LoraPlan, adapter_inputs


class AdapterChoice:
    """Which adapter each token of the next pass has."""

    def __init__(self, model: nn.Module, plan: LoraPlan) -> None:
        """Take a model with the adapters of ``plan``, and hook into them; several adapters only."""
        self._plan = plan
        self._others_TR: Tensor | None = None
        for module in adapter_inputs(model):
            module.register_forward_hook(self._keep_own)

    def choose(self, adapters_T: Tensor | None, num_tokens: int, device: torch.device) -> None:
        """Give the tokens of the next pass their adapters, int64 [T]; None: all have the first. It stays until the next
        call, for backward passes compute checkpointed activations again."""
        if adapters_T is None:
            adapters_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        owners_R = torch.arange(self._plan.num_adapters, device=device).repeat_interleave(self._plan.rank)
        self._others_TR = adapters_T[:, None] != owners_R

    def _keep_own(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert self._others_TR is not None, "choose was not called"
        return output.masked_fill(self._others_TR, 0)
