"""Chooses the values of a configuration so that they fit the model, the tasks and the hardware. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from gspo_services.prepare.init.choices import Answers
from gspo_services.shared.estimates import Device, ModelShape, engine_memory, learner_memory
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings

SMALL: Final = 5_000_000
"""Parameters of a model that is made for trying things."""
NAMED_SIZE: Final = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)B(?![a-z])", re.IGNORECASE)
LORA_RATE: Final = 5
"""Adapters need five to ten times the learning rate of all weights."""
Offload = Literal["none", "optimizer"]
GPUS_OF_A_NODE: Final = 8
SPARE_SHARE: Final = 0.06
"""Of a shared GPU that neither learner nor server plans with."""


@dataclass(frozen=True, kw_only=True)
class ProjectPlan:
    """The values of run.toml that are chosen."""

    dtype: Literal["float32", "bfloat16"]
    is_small: bool
    max_turn_tokens: int
    max_tokens: int
    groups_per_batch: int
    num_batches: int
    num_eval_tasks: int
    group_size: int = 8
    mini_batches: int = 4
    max_lag: int = 2
    learning_rate: float
    lora_rank: int = 0
    max_tokens_per_micro_batch: int
    num_servers: int
    num_ranks: int
    zero_stage: int
    offload: Offload = "none"
    activation_checkpointing: bool
    max_running: int
    max_total_tokens: int
    static_share: float | None = None
    """Of a GPU that the server shares with the learner."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of model and tasks."""

    shape: ModelShape | None
    parameters: float | None
    """From the shape, or from the model's name; None: not known."""
    prompt_tokens: int
    """The longest prompt."""
    gold_tokens: int = 0
    """The longest answer that a small model must have room for, where it is LaTeX in a box or a program."""
    num_train: int | None
    num_eval: int | None
    """None: endless."""
    device: Device | None


def size_in_name(model: str) -> float | None:
    """The parameters that a model's name tells, as 30e9 for Qwen3-30B-A3B; None for a name without."""
    found = NAMED_SIZE.search(model)
    return float(found[1]) * 1e9 if found else None


def plan_of(answers: Answers, facts: Facts) -> ProjectPlan:
    """Values that fit each other. Raises: ConfigurationError when the model does not fit the hardware."""
    small = facts.parameters is not None and facts.parameters < SMALL
    cuda = answers.place != "laptop"
    turn = answers.answer_tokens or (max(8, facts.gold_tokens) if small else 1024 if cuda else 128)
    step = 16 if small else 64
    max_tokens = max(64, -(-(facts.prompt_tokens + turn) // step) * step)
    groups = _groups(answers, facts, small=small)
    ranks = _ranks(answers)
    servers = max(1, answers.num_gpus - ranks) if answers.place in ("node", "kubernetes") else 1 if cuda else 2
    running = 64 if not cuda else 128
    plan = ProjectPlan(
        dtype="bfloat16" if cuda else "float32",
        is_small=small,
        max_turn_tokens=turn,
        max_tokens=max_tokens,
        groups_per_batch=groups,
        num_batches=60 if small else 200 if cuda else 20,
        num_eval_tasks=min(128, facts.num_eval or 128),
        lora_rank=answers.lora_rank,
        learning_rate=(2e-4 if small else 1e-6) * (LORA_RATE if answers.lora_rank else 1),
        max_tokens_per_micro_batch=max(4096, max_tokens) if not cuda else max(8192, 2 * max_tokens),
        num_servers=servers,
        num_ranks=ranks,
        zero_stage=3 if ranks > 1 else 1,
        activation_checkpointing=cuda and not small,
        max_running=running,
        max_total_tokens=max(16_384, -(-running * max_tokens // 1024) * 1024),
    )
    return _fitted(answers, facts, plan) if cuda else plan


def _groups(answers: Answers, facts: Facts, *, small: bool) -> int:
    """Groups of a batch: a multiple of the mini-batches, and no more than there are tasks."""
    wanted = 32 if small or answers.place in ("laptop", "gpu") else 64
    if not small and answers.place == "laptop":
        wanted = 8
    if facts.num_train is None:
        return wanted
    return max(4, min(wanted, facts.num_train // 4 * 4))


def _ranks(answers: Answers) -> int:
    """Half of the GPUs, rounded down to a power of two: it divides heads and experts. On a cluster: of one node."""
    if answers.place not in ("node", "kubernetes"):
        return 1
    half = 1 << max(0, (answers.num_gpus // 2).bit_length() - 1)
    return min(half, GPUS_OF_A_NODE) if answers.place == "kubernetes" else half


def settings_for(plan: ProjectPlan) -> Settings:
    """The settings that memory depends on."""
    arguments = [] if plan.static_share is None else ["--mem-fraction-static", f"{plan.static_share:g}"]
    return Settings.model_validate(
        {
            "model": {"dtype": plan.dtype},
            "lora": {"rank": plan.lora_rank},
            "sampling": {"max_turn_tokens": plan.max_turn_tokens, "max_tokens": plan.max_tokens},
            "batch": {"groups_per_batch": plan.groups_per_batch, "mini_batches": plan.mini_batches},
            "rollout": {
                "max_running": plan.max_running, "max_total_tokens": plan.max_total_tokens, "server_args": arguments
            },
            "learner": {
                "num_ranks": plan.num_ranks, "zero_stage": plan.zero_stage, "offload": plan.offload, "dtype": plan.dtype,
                "max_tokens_per_micro_batch": plan.max_tokens_per_micro_batch,
                "activation_checkpointing": plan.activation_checkpointing,
            },
        }
    )  # fmt: skip


def _fitted(answers: Answers, facts: Facts, plan: ProjectPlan) -> ProjectPlan:
    """Offload, and the share of a GPU that two have, as its memory allows. Nothing without a shape or a known GPU.

    Raises: ConfigurationError when nothing fits.
    """
    shape, device = facts.shape, facts.device
    if shape is None or device is None:
        return replace(plan, static_share=0.4) if answers.place == "gpu" else plan
    room = device.memory_bytes
    tried: tuple[Offload, ...] = ("none", "optimizer")
    for offload in tried:
        candidate = replace(plan, offload=offload)
        learner = learner_memory(shape, settings_for(candidate), cuda=True).total.high
        if answers.place != "gpu":
            if learner <= room:
                return _limited(shape, room, candidate)
            continue
        share = int((1 - SPARE_SHARE - learner / room) * 20) / 20
        if share > 0:
            candidate = replace(candidate, static_share=min(share, 0.6))
            engine = engine_memory(shape, settings_for(candidate), room)
            if engine.running(plan.max_tokens) >= 8:
                return _limited(shape, room, candidate)
    raise ConfigurationError(
        f"{answers.model} ({shape.parameters / 1e9:.3g} billion parameters) does not fit: {answers.num_gpus} x "
        f"{device.name} of {room / 2**30:.0f} GiB. Use more GPUs (--hardware node --gpus N), or a smaller model (--model)"
    )


def _limited(shape: ModelShape, room: float, plan: ProjectPlan) -> ProjectPlan:
    """No more requests than the server's cache holds, in the mean."""
    fitting = engine_memory(shape, settings_for(plan), room).running(plan.max_tokens)
    return replace(plan, max_running=max(8, min(plan.max_running, int(fitting))))
