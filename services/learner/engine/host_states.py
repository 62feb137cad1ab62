"""Between two turns on a device that the learner shares, its weights and optimizer states are in the host's memory.

DeepSpeed 0.19.8 moves them in the optimizers of ZeRO 1 and 2 (runtime/zero/stage_1_and_2.py, ``offload_states``). Its
optimizer for ZeRO 1 in bfloat16 has no such method, nor has any without ZeRO, and that of ZeRO 3 asserts its own FusedAdam.
Tensors that no optimizer knows are moved here: frozen weights, and frozen models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from gspo_services.learner.engine.frozen import FrozenModel

HOST = torch.device("cpu")


class HostStates:
    """Moves one rank's device tensors in both directions. Nothing may be computed in between."""

    def __init__(self, engine: Any, frozen: Sequence[FrozenModel], device: torch.device) -> None:
        self._engine = engine
        self._models = frozen
        self._device = device
        self.away = False
        """Whether the states are in the host's memory."""

    def leave(self) -> None:
        """Move them to the host, and free the device's memory except CUDA's context."""
        if self.away:
            return
        self._engine.offload_states(pin_memory=self._device.type == "cuda")
        self._move_others(HOST)
        self.away = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Move them to the device again."""
        if not self.away:
            return
        self._engine.reload_states()
        # Adam's counts of steps, too, are where DeepSpeed puts them: a fused Adam wants them beside its tensors.
        self._move_others(self._device)
        self.away = False

    def _move_others(self, device: torch.device) -> None:
        for parameter in _frozen(self._engine.module.parameters()):
            parameter.data = parameter.data.to(device)
        for model in self._models:
            model.move(device)


def _frozen(parameters: Iterable[nn.Parameter]) -> Iterable[nn.Parameter]:
    return (parameter for parameter in parameters if not parameter.requires_grad)
