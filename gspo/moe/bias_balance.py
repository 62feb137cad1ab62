"""Load balance without a loss: a bias of each expert that moves against its load (Loss-Free Balancing, arXiv 2408.15664).

Routers of DeepSeek-V3's kind choose by scores plus a bias, and weight by scores alone. The bias has no gradient. After each
optimizer step it becomes, in every layer,

    b_e + u sign(mean of c - c_e),   c_e = picks of expert e in the step, at positions that predict an action token

(algorithm 1 there, whose batch counts all its tokens). DeepSeek-V3 was trained with u = 0.001 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from gspo.moe.experts import ExpertPicks, find_routers, load_of

BIAS: Final = "e_score_correction_bias"
"""The buffer's name in transformers."""


class BiasBalance:
    """Moves the biases of one model, the same on all ranks."""

    def __init__(self, model: Any, rate: float) -> None:
        """Take a Hugging Face model, with or without DeepSpeed's expert parallelism.

        Raises: ValueError when a router has no such bias, or one in which steps of ``rate`` would be lost.
        """
        self._rate = rate
        self._biases = [_bias_of(model, name) for name in find_routers(model)]
        self._load_LE: Tensor | None = None

    def count(self, picks: ExpertPicks | None, mask_T: Tensor) -> None:
        """Count the picks of one training pass at the positions of ``mask_T``, bool [T]. Raises: ValueError for none."""
        if picks is None:
            raise ValueError("this model's router choices cannot be recorded; set objective.expert_bias_rate = 0")
        load_LE = load_of(picks, mask_T)
        self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE

    def step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Move the biases by what was counted since the last step on all ranks. Collective. Does not wait for the device.

        Args:
            sum_over_ranks: the element-wise sum of every rank's tensor.
        """
        own_LE = torch.zeros(len(self._biases), len(self._biases[0])) if self._load_LE is None else self._load_LE
        self._load_LE = None
        # Whole numbers: sums are exact, so that ranks and layouts agree to the bit.
        load_LE = sum_over_ranks(own_LE.double())
        for bias_E, load_E in zip(self._biases, load_LE, strict=True):
            bias_E.add_((load_E.mean() - load_E).sign().to(bias_E.dtype), alpha=self._rate)


def _bias_of(model: Any, router: str) -> Tensor:
    module = model.get_submodule(router)
    # MiniMax-M2 has it beside the router.
    owners = (module, model.get_submodule(router.rpartition(".")[0]))
    bias = next((found for each in owners if (found := getattr(each, BIAS, None)) is not None), None)
    if not isinstance(bias, Tensor) or isinstance(bias, torch.nn.Parameter) or bias.dim() != 1:
        raise ValueError(
            f"{router} ({type(module).__name__}) has no bias that can be moved ({BIAS}, a buffer); set "
            "objective.expert_bias_rate = 0"
        )
    if bias.dtype != torch.float32:
        raise ValueError(
            f"the bias of {router} is {str(bias.dtype).removeprefix('torch.')} here, which would lose small steps; set "
            "learner.dtype = 'float32', or objective.expert_bias_rate = 0"
        )
    return bias
