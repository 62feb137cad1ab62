"""Settings of the learner's engine, without torch: a service can check them before it loads anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gspo_services.shared.settings import SCORES_DIRECTORY, Learner, LoraSection, Settings

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class TeacherAddress:
    """A teacher that is a server, and where its answers are kept."""

    url: str
    timeout_s: float
    scores: Path
    """A directory of the run."""
    earlier: Path | None = None
    """That of a run whose batches are trained again: what is known there is not asked for."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The section ``learner``, and what the engine needs of the rest of the run."""

    learner: Learner
    device: Device
    max_sequence_tokens: int | None
    """A longer sequence is an error; None lets any length travel, alone in its micro-batch."""
    routing_replay: bool
    """The engine can make its routers choose given experts (``gspo.moe.routing_replay``); a dense model is refused."""
    seed: int
    replays_engine: bool = False
    """With ``routing_replay``: the experts are those that the engine chose, and not those of the batch's start."""
    keeps_reference: bool = False
    """The engine keeps a frozen copy of the start model, for a KL term: see ``gspo_services.learner.engine.frozen``."""
    teacher: Path | None = None
    """The directory of a model that is kept frozen, too, and scores tokens; None: there is none."""
    teacher_server: TeacherAddress | None = None
    """A server that scores tokens instead."""
    entropy_gradient: bool = False
    """The entropies of a training pass carry a gradient, for an entropy bonus."""
    load_balance_coefficient: float = 0.0
    """Weight of the auxiliary loss of ``gspo.moe.load_balance``; a dense model is refused."""
    expert_bias_rate: float = 0.0
    """The step of ``gspo.moe.bias_balance``; models whose routers have no bias are refused."""
    lora: LoraSection = field(default_factory=LoraSection)
    """With a rank above 0 only adapters are trained; the weights that leave the engine have them merged."""
    leaves_device: bool = False
    """The engine's states leave the device while the rollout has it (``run.colocate``). Only ZeRO's optimizers can do so."""
    float32_head: bool = False
    """The output embedding multiplies in float32, as SGLang's does with ``model.float32_head``."""
    zero3_persistence_elements: int = 100_000
    """ZeRO-3 keeps parameters below this size whole on every rank: fewer gathers for more memory."""


def engine_settings_of(settings: Settings, device: Device) -> EngineSettings:
    """Return the engine's part of a run's settings."""
    return EngineSettings(
        learner=settings.learner,
        device=device,
        # The limit may change within a run, and each trajectory comes with its own.
        max_sequence_tokens=None,
        routing_replay=settings.objective.routing_replay,
        replays_engine=settings.objective.routing_replay_from == "engine",
        seed=settings.run.seed,
        load_balance_coefficient=settings.objective.load_balance_coefficient,
        expert_bias_rate=settings.objective.expert_bias_rate,
        keeps_reference=settings.objective.kl_coefficient > 0,
        teacher=Path(settings.distillation.directory) if settings.distillation.directory else None,
        teacher_server=_teacher_server(settings),
        entropy_gradient=settings.objective.entropy_coefficient > 0,
        lora=settings.lora,
        leaves_device=settings.run.colocate,
        float32_head=settings.model.float32_head,
    )


def _teacher_server(settings: Settings) -> TeacherAddress | None:
    distillation = settings.distillation
    if not distillation.url:
        return None
    scores = settings.run.directory / SCORES_DIRECTORY
    return TeacherAddress(url=distillation.url, timeout_s=distillation.timeout_s, scores=scores)
