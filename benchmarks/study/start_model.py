"""The start model of every run: it imitates first a careful and then a careless teacher, and is kept on disk.

The tiny one is like the project's tiny model, but for one task: it costs less and does not depend on the project's other
tasks. The deep one has three times the layers and eight times the experts, of which each token uses four times as many.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from benchmarks.study.config import ModelName, TaskName
from gspo.moe.experts import find_routers
from gspo.tasks.environments import DemonstratingEnvironment
from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, encode
from gspo_services.prepare.tiny_models.tiny import build_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.tasks.environments import create_environment

COUNTDOWN = "benchmarks.study.tasks.countdown:Countdown"
ENVIRONMENTS: dict[TaskName, tuple[str, dict[str, Any]]] = {
    "arithmetic": ("arithmetic", {}),
    "countdown": (COUNTDOWN, {}),
    # 6 to 120 tokens: the longest answer has twenty times the tokens of the shortest.
    "mixed-countdown": (COUNTDOWN, {"min_numbers": 2, "max_numbers": 40}),
    # Chains of 32 numbers need a smaller share of errors at each, so that half of them are right.
    "long-countdown": (COUNTDOWN, {"digits": 3, "min_numbers": 25, "max_numbers": 40, "slip": 0.01, "give_up": 0.01}),
}
SIZES: dict[ModelName, dict[str, int]] = {
    "tiny": {},
    "deep": {"num_layers": 6, "num_experts": 64, "num_experts_per_token": 8, "expert_size": 16},
}
ROUTER_STD: dict[ModelName, float] = {"deep": 0.0005}
"""Routers that keep their first weights while the rest imitates, with this deviation, so that their logits lie close
together. Routers that imitate too end with weights a hundred times as large, and an update hardly changes their choice."""
ROUTER_JITTER = 0.2
"""Noise on these weights while the rest imitates, drawn anew at each step, as a share of their deviation. It changes a
sixth of the choices, so that the policy has seen such changes before its routers are trained."""
NUM_STEPS: dict[ModelName, int] = {"tiny": 600, "deep": 1_000}
CAREFUL_SHARE = 0.8
BATCH_TOKENS: dict[TaskName, int] = {
    "arithmetic": 1_250,
    "countdown": 2_500,
    "long-countdown": 2_500,
    "mixed-countdown": 2_500,
}
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
DECAY_STEPS = 270


def study_environment(task: TaskName) -> DemonstratingEnvironment:
    """Return the task's environment with the study's options."""
    environment = create_environment(*ENVIRONMENTS[task])
    assert isinstance(environment, DemonstratingEnvironment)
    return environment


def load_start_model(
    directory: Path, task: TaskName, seed: int, *, model: ModelName = "tiny", num_steps: int | None = None
) -> Qwen3MoeForCausalLM:
    """Return the start model of ``task`` and ``seed`` in float32; make it under ``directory`` if it is missing.

    num_steps: of imitation; None: as many as ``NUM_STEPS`` says.
    """
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    policy = build_model(tokenizer, **SIZES[model])
    routers = [router.weight for router in find_routers(policy).values()] if model in ROUTER_STD else []
    for weight in routers:
        torch.nn.init.normal_(weight.requires_grad_(False), std=ROUTER_STD[model])
    steps = NUM_STEPS[model] if num_steps is None else num_steps
    name = task if model == "tiny" else f"{task}-{model}"
    path = directory / f"{name}-{seed}-{steps}.safetensors"
    if not path.is_file():
        demonstrations = study_environment(task)
        _imitate(policy, tokenizer, demonstrations, random.Random(seed), BATCH_TOKENS[task], steps, routers=routers)
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file(policy.state_dict(), unfinished, metadata={"made": json.dumps({"task": task, "seed": seed})})
        unfinished.rename(path)
    for weight in routers:
        weight.requires_grad_(True)
    policy.load_state_dict(load_file(path))
    policy.set_experts_implementation("grouped_mm")
    return policy


def _imitate(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: DemonstratingEnvironment,
    rng: random.Random,
    batch_tokens: int,
    num_steps: int,
    *,
    routers: Sequence[Tensor] = (),
) -> None:
    """Train supervised on demonstrations, ``batch_tokens`` tokens of them (padding included) per step.

    routers: weights that are not trained but jittered; they end as they were.
    """
    drawn = [weight.clone() for weight in routers]
    shown = encode(tokenizer, [environment.demonstration(rng, careful=True) for _ in range(32)])
    batch_size = max(1, batch_tokens // max(len(lesson.ids) for lesson in shown))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / DECAY_STEPS)
    )
    for step in range(num_steps):
        careful = step < CAREFUL_SHARE * num_steps
        lessons = encode(tokenizer, [environment.demonstration(rng, careful=careful) for _ in range(batch_size)])
        for weight, first in zip(routers, drawn, strict=True):
            weight.copy_(first + ROUTER_JITTER * first.std() * torch.randn_like(first))
        length = max(len(lesson.ids) for lesson in lessons)
        ids_BT = torch.tensor([x.ids + [tokenizer.pad_token_id] * (length - len(x.ids)) for x in lessons])
        labels_BT = torch.tensor([x.labels + [IGNORED_LABEL] * (length - len(x.labels)) for x in lessons])
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    for weight, first in zip(routers, drawn, strict=True):
        weight.copy_(first)
