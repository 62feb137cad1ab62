"""Settings of the learner's engine, without torch: a service can check them before it loads anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from services.runtime.settings import Settings

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Offload = Literal["none", "optimizer", "optimizer_and_parameters"]


@dataclass(frozen=True, kw_only=True)
class LearnerEngineSettings:
    """Raises ValueError for a combination that would train wrongly."""

    device: Device = "cpu"
    dtype: DType = "float32"
    zero_stage: int = 1
    """0 replicates everything; 1 partitions optimizer states, 2 gradients too, 3 parameters too."""
    expert_parallel: int = 1
    """Ranks that share a layer's experts (DeepSpeed's AutoEP); 1: every rank has them all. See `parallelism`."""
    offload: Offload = "none"
    """What is kept in the host's memory: nothing; master weights, Adam's moments and its step; the parameters too."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises from learning_rate / warmup_steps; constant afterwards."""
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    token_budget: int = 8192
    """Tokens of one packed micro-batch on one rank."""
    max_sequence_tokens: int | None = None
    """A longer sequence is an error; None lets any length travel, alone in its micro-batch."""
    logprob_chunk_tokens: int = 1024
    """Rows of logits held at once."""
    activation_checkpointing: bool = False
    """Recompute activations in backward: about a third more time for a fraction of the memory."""
    routing_replay: bool = False
    """The engine can make its routers choose given experts (`gspo.moe.routing_replay`); a dense model is refused."""
    zero3_persistence_elements: int = 100_000
    """ZeRO-3 keeps parameters below this size whole on every rank: fewer gathers for more memory."""
    collective_timeout_s: float = 1800.0
    """A collective that some rank has not come to after so long fails on the others."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage is {self.zero_stage}; it must be 0, 1, 2 or 3")
        if self.dtype not in get_args(DType):
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {list(get_args(DType))}")
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError("zero_stage 0 with bfloat16 gets Adam's first step wrong; use zero_stage 1 or higher")
        if self.offload not in get_args(Offload):
            raise ValueError(f"offload is {self.offload!r}; it must be one of {list(get_args(Offload))}")
        for name, number in (
            ("token_budget", self.token_budget),
            ("logprob_chunk_tokens", self.logprob_chunk_tokens),
            ("expert_parallel", self.expert_parallel),
            ("collective_timeout_s", self.collective_timeout_s),
        ):
            if number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1")
        for name, value in (
            ("learning_rate", self.learning_rate),
            ("max_grad_norm", self.max_grad_norm),
            ("weight_decay", self.weight_decay),
            ("warmup_steps", self.warmup_steps),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")


def engine_settings_of(settings: Settings, device: Device) -> LearnerEngineSettings:
    """The engine's part of a run's settings."""
    learner = settings.learner
    return LearnerEngineSettings(
        device=device,
        dtype=learner.dtype,
        zero_stage=learner.zero_stage,
        expert_parallel=learner.expert_parallel,
        offload=learner.offload,
        learning_rate=learner.learning_rate,
        warmup_steps=learner.warmup_steps,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        token_budget=learner.token_budget,
        max_sequence_tokens=settings.sampling.max_tokens,
        logprob_chunk_tokens=learner.logprob_chunk_tokens,
        activation_checkpointing=learner.activation_checkpointing,
        routing_replay=settings.objective.routing_replay,
        collective_timeout_s=learner.collective_timeout_s,
        seed=settings.run.seed,
    )
