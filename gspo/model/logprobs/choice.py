"""Whether a GPU uses the kernels: only where they compile, and give what plain PyTorch gives. Asked once a process."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

MODULE: Final = "gspo.model.logprobs.kernels"
ROWS: Final = 3
LOGITS: Final = 5000
"""More than one block of the kernels, and a part of one."""
CLOSE: Final = 1e-4
"""Both compute in float32; a kernel that is wrong is off by far more."""


@cache
def kernels_for(device: torch.device, *, has_values: bool = True) -> ModuleType | None:
    """Return the module with the kernels; None, and a line in the log, where plain PyTorch must do.

    ``has_values``: tensors are real, so that results can be compared.
    """
    try:
        kernels = importlib.import_module(MODULE)
        off = distance(kernels, device) if has_values else 0.0
        if not off <= CLOSE:
            raise RuntimeError(f"they are off by {off:.2g}")
    except Exception as error:  # noqa: BLE001 - Triton raises errors of many classes, those of the C compiler among them
        logging.getLogger(__name__).warning(
            "the output embedding's kernels are not used on %s: plain PyTorch moves six times as many bytes; "
            "learner.fused_head = false chooses that: %s: %s",
            device, type(error).__name__, str(error)[:2000],
        )  # fmt: skip
        return None
    return kernels


def distance(kernels: ModuleType, device: torch.device) -> float:
    """Return how far log-probs and slopes are from float64, at most, in nats and per unit of the gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(ROWS, LOGITS, generator=generator)).to(device)
    targets = torch.tensor([0, LOGITS // 2, LOGITS - 1], device=device)
    temperatures = torch.tensor([0.5, 1.0, 2.0], device=device)
    gradients = 1 / temperatures
    exact = torch.log_softmax(logits.double() / temperatures[:, None], dim=-1)
    chosen = torch.nn.functional.one_hot(targets, LOGITS)
    normalisers, logprobs, _ = kernels.sums(logits, temperatures, targets, None, False)
    slopes = logits.clone()
    kernels.slopes_(slopes, temperatures, targets, normalisers, gradients, None, None, None)
    wrong: list[Tensor] = [
        logprobs - exact.gather(-1, targets[:, None]).squeeze(-1),
        slopes - (chosen - exact.exp()) * gradients[:, None],
    ]
    # torch's maximum of a NaN is one, Python's need not be.
    return float(torch.stack([each.abs().max() for each in wrong]).max())
