"""Training that a client leads: passes add gradients up until its optimizer step, with its Adam values.

    for each call:   logprobs, backward            no boundary: gradients stay in ``grad``
    optimizer step:  step                          the boundary is forced, because the calls per step vary

Several models share one engine as adapters of one base: each is a ``ClientState`` that is put into the engine for its turn
and taken out afterwards, so that its numbers are those it would have alone. Not collective: one rank, without ZeRO inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from gspo.model.boundaries import Boundaries
from gspo.model.logprobs import Scored, TokenLogProbs
from gspo.model.lora import set_scale
from gspo_services.learner.engine.gradients import WholeGradients

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """Sequences end to end, and any targets of any of their tokens: M of them."""

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]; starts at 0 in each sequence."""
    ends: tuple[int, ...]
    """[S + 1] boundaries of the sequences, from 0 on."""
    targets_M: Tensor
    """int64"""
    states_M: Tensor
    """int64; the token that predicts each target."""


@dataclass(frozen=True, kw_only=True)
class AdamValues:
    """The values of one step of AdamW; ``max_norm`` 0 clips nothing."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


@dataclass(kw_only=True)
class ClientState:
    """One model of a client: what the engine has of it during its turn. Tensors on the CPU, by parameter."""

    values: list[Tensor]
    moments: list[tuple[Tensor, ...]]
    """Adam's two, of each."""
    gradients: list[Tensor | None]
    """Added up since the last step."""
    num_steps: int
    scale: float
    """By which B A is multiplied."""


class ClientSteps:
    """The engine of one rank, led step by step."""

    def __init__(self, engine: Any, parameters: Sequence[tuple[str, nn.Parameter]], gradients: WholeGradients) -> None:
        """``parameters``: those that are trained. ``LearnerEngine.client_steps`` makes one."""
        self._engine = engine
        self._gradients = gradients
        self._parameters = [parameter for _, parameter in parameters]
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
        """Of what a state has values of, in their order."""

    def logprobs(self, row: ClientRow, *, with_gradient: bool) -> Tensor:
        """Log-probs of the targets at temperature 1, float32 [M]."""
        device = self._engine.device
        states_M = row.states_M.to(device)
        places_M = torch.arange(len(states_M), device=device)
        self._engine.set_gradient_accumulation_boundary(False)
        with torch.set_grad_enabled(with_gradient):
            result: TokenLogProbs = self._engine(
                input_ids=row.input_ids.to(device),
                position_ids=row.position_ids.to(device),
                cu_seqlens=Boundaries(row.ends),
                targets_T=row.targets_M.to(device),
                temperatures_T=torch.ones(len(states_M), device=device),
                scored=Scored(places_M, states_M),
                with_entropy=False,
                entropy_gradient=False,
            )
        return result.logprobs_T

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to what is there."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradients(self) -> list[Tensor | None]:
        """Copies of what is added up so far, for ``restore``: a call that fails half-way must leave nothing."""
        return [None if each.grad is None else each.grad.detach().clone() for each in self._parameters]

    def restore(self, gradients: Sequence[Tensor | None]) -> None:
        """Put gradients in the place of those that are there."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def step(self, adam: AdamValues) -> float:
        """Make an optimizer step on the gradients, zeros where there are none, and drop them. Returns their norm before.

        Raises: ValueError when one is not finite; the weights are unchanged then, and the gradients dropped.
        """
        for group in self._engine.optimizer.param_groups:
            group.update(lr=adam.learning_rate, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
        if bool(self._gradients.take(self._engine.device)[1].any()):
            self.restore([None] * len(self._parameters))
            raise ValueError("a gradient is not finite: the gradients were dropped and the weights are unchanged")
        norm = self._gradients.clip(adam.max_norm)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        self.restore([None] * len(self._parameters))
        assert norm is not None
        return norm

    def take_out(self, scale: float) -> ClientState:
        """Copy what the engine has of its present model, whose scale is ``scale``."""
        self._make_moments()
        states = [self._adam.state[each] for each in self._parameters]
        return ClientState(
            values=[each.detach().to("cpu", copy=True) for each in self._parameters],
            moments=[tuple(state[kind].to("cpu", copy=True) for kind in MOMENTS) for state in states],
            gradients=[None if each is None else each.cpu() for each in self.gradients()],
            num_steps=int(states[0]["step"]),
            scale=scale,
        )

    def put_in(self, state: ClientState) -> None:
        """Make this the engine's model."""
        self._make_moments()
        set_scale(self._engine.module, state.scale)
        with torch.no_grad():
            for parameter, value, moments in zip(self._parameters, state.values, state.moments, strict=True):
                parameter.copy_(value)
                own = self._adam.state[parameter]
                own["step"].fill_(float(state.num_steps))
                for kind, moment in zip(MOMENTS, moments, strict=True):
                    own[kind].copy_(moment)
        self.restore(state.gradients)

    @property
    def _adam(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        assert isinstance(optimizer, torch.optim.AdamW)
        return optimizer

    def _make_moments(self) -> None:
        """Make what Adam makes itself only in its first step."""
        fused = any(group.get("fused") for group in self._adam.param_groups)
        for parameter in self._parameters:
            state = self._adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
                state.update({kind: torch.zeros_like(parameter) for kind in MOMENTS})
