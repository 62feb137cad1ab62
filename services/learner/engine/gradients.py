"""Checks every gradient before the optimizer steps, and clips those that no ZeRO stage has taken over.

Wrongly marked modules once silently froze 390 of 417 parameters of a model. A single NaN ruins all weights, and nothing
distinguishes them from good ones. Both are detected before the optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn

from gspo_services.learner.engine.expert_parallel import ExpertShare
from gspo_services.shared.runtime.errors import ServiceError


class GradientError(ServiceError):
    """Gradients that the optimizer must not step on. The weights are unchanged since before the mini-batch, but the engine
    holds half a mini-batch of gradients and cannot continue: resume from a checkpoint."""


class MissingGradientError(GradientError):
    """Parameters of the model that got no gradient."""


class NonFiniteGradientError(GradientError):
    """A gradient that contains NaN or infinity."""


class NonFiniteLossError(GradientError):
    """A loss that is NaN or infinite."""


class GradientWatch:
    """Sees every gradient as autograd produces it, before ZeRO reduces and frees it: hooks on the parameters of one model.

    An expert slab counts as one parameter, whichever experts were chosen. A gradient whose squares overflow float32 counts
    as not finite: the norm of all gradients would be infinite.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.names: list[str] = []
        self._received: list[bool] = []
        self._norms: list[Tensor | None] = []
        """The largest norm of each parameter's gradients."""
        for name, parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(partial(self._observe, len(self.names)))
            self.names.append(name)
            self._received.append(False)
            self._norms.append(None)

    def _observe(self, index: int, gradient: Tensor) -> None:
        self._received[index] = True
        if gradient.numel() == 0:
            return
        # The norm is finite only if every element is: one kernel, no temporary, and the result stays on the device. On a CPU
        # it takes a ninth of the time of the largest magnitude, which is not vectorised.
        norm = torch.linalg.vector_norm(gradient)
        earlier = self._norms[index]
        self._norms[index] = norm if earlier is None else torch.maximum(earlier, norm)

    def take(self, device: torch.device) -> Tensor:
        """Findings since the last call, float32 [2, P]: got a gradient (1 or 0); was not finite (1 or 0)."""
        clean = torch.zeros((), device=device)
        norms = torch.stack([clean if norm is None else norm.float() for norm in self._norms])
        bad = (~torch.isfinite(norms)).float()
        received = torch.tensor(self._received, dtype=torch.float32).to(device, non_blocking=True)
        self._received = [False] * len(self.names)
        self._norms = [None] * len(self.names)
        return torch.stack([received, bad])

    def clip(self, max_norm: float) -> float | None:
        """Return None: DeepSpeed's optimizer clips, and knows the norm."""
        return None


class ReplicatedGradients(GradientWatch):
    """Watches and clips the gradients of ranks without ZeRO, which DeepSpeed leaves whole in ``grad``.

    In float32 without ZeRO DeepSpeed does not report the norm, and with expert parallelism it clips by a mean of the ranks'
    norms.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], model: nn.Module, shares: Mapping[int, ExpertShare]
    ) -> None:
        super().__init__(parameters)
        self._model = model
        self._shares = shares

    def clip(self, max_norm: float) -> float | None:
        """Scale the gradients down to ``max_norm`` over all ranks; 0 leaves them. Returns their norm before. Collective."""
        slabs = [p.grad for p in self._model.parameters() if p.grad is not None and id(p) in self._shares]
        others = [p.grad for p in self._model.parameters() if p.grad is not None and id(p) not in self._shares]
        square = torch.nn.utils.get_total_norm(others) ** 2
        if slabs:
            of_experts = torch.nn.utils.get_total_norm(slabs) ** 2
            torch.distributed.all_reduce(of_experts, group=next(iter(self._shares.values())).group)
            square = square + of_experts
        norm = square.sqrt()
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), max_norm, norm)
        return float(norm)


class WholeGradients:
    """The gradients of one rank alone, in float32: they stay in ``grad`` until the step, so no hook needs to see them.

    Norm and clipping are those of DeepSpeed's ZeRO 1 (0.19.8, runtime/zero/stage_1_and_2.py: ``get_grad_norm_direct``,
    ``unscale_and_clip_grads``), operation by operation, so that the weights are those of ZeRO 1 to the bit.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], groups: Iterable[Mapping[str, Any]]) -> None:
        """``groups``: the optimizer's."""
        pairs = list(parameters)
        self.names = [name for name, _ in pairs]
        self._parameters = [parameter for _, parameter in pairs]
        self._group_of = {id(each): index for index, group in enumerate(groups) for each in group["params"]}
        self._norms: dict[int, list[Tensor]] = {}
        """float64, of the parameters that are trained, by group."""

    def take(self, device: torch.device) -> Tensor:
        """As ``GradientWatch.take``: float32 [2, P]. A trained parameter without a gradient then has one of zeros."""
        received = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.float32)
        clean = torch.zeros((), dtype=torch.float64, device=device)
        norms = [_norm_in_double(parameter) if parameter.requires_grad else None for parameter in self._parameters]
        self._norms = {index: [] for index in sorted(set(self._group_of.values()))}
        for parameter, norm in zip(self._parameters, norms, strict=True):
            if norm is not None:
                self._norms[self._group_of[id(parameter)]].append(norm)
        bad = ~torch.isfinite(torch.stack([clean if norm is None else norm for norm in norms]))
        return torch.stack([received.to(device, non_blocking=True), bad.float()])

    def clip(self, max_norm: float) -> float | None:
        """Scale the gradients that ``take`` saw down to ``max_norm``; 0 leaves them. Returns their norm before.

        Raises: NonFiniteGradientError, before they are changed, when the norm overflows float32.
        """
        # DeepSpeed has a norm for each group of parameters, and the norm of these.
        totals = [torch.stack(norms).pow(2.0).sum().float().pow(0.5) for norms in self._norms.values()]
        norm = torch.linalg.vector_norm(torch.stack(totals), ord=2)
        factor = 1.0 / torch.clamp((norm + 1e-6) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)
        grad_norm, scale = torch.stack([norm, factor]).tolist()
        if not math.isfinite(grad_norm):
            raise NonFiniteGradientError(f"the gradient norm is {grad_norm}; no step was made")
        if scale != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return float(grad_norm)


PART: Final = 2**16
"""Elements that are held as float64 at a time."""


def _norm_in_double(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        # Adam's moments decay all the same, as with ZeRO.
        parameter.grad = torch.zeros_like(parameter)
    # In parts that stay in a core's cache: 30 times as fast as a copy of the whole. What that changes, the last bits of a
    # double, is gone when the total is rounded to float32.
    parts = [torch.linalg.vector_norm(part.double()) for part in parameter.grad.flatten().split(PART)]
    norm: Tensor = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
    return norm


def gradients_of(
    engine: Any,
    parameters: Sequence[tuple[str, nn.Parameter]],
    shares: Mapping[int, ExpertShare],
    *,
    configured_stage: int,
    stage: int,
) -> GradientWatch | WholeGradients:
    """Return a watch of the gradients of DeepSpeed's ``engine``, which may run another ``stage`` than the settings say."""
    if stage > 0:
        return GradientWatch(parameters)
    if configured_stage == 0:
        return ReplicatedGradients(parameters, engine.module, shares)
    # There are no other ranks: DeepSpeed would copy every gradient into a bucket and back.
    engine.enable_backward_allreduce = False
    return WholeGradients(parameters, engine.optimizer.param_groups)
