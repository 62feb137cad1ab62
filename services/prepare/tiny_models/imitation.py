"""Supervised training on demonstrations: first of a careful teacher, then of a careless one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3MoeForCausalLM

from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, Lesson
from gspo_services.prepare.tiny_models.schools import Demonstrator

CAREFUL_SHARE = 0.8
"""Share of the steps with the careful teacher: the skill takes longer to learn than the bad habits."""
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 30
DECAY_SHARE = 0.45


@dataclass(frozen=True)
class TinyProgress:
    """Progress of the cold start; reported about once a second."""

    step: int
    """Optimizer steps that are done, from 1."""
    num_steps: int
    seconds: float
    """Since the first step began."""
    loss: float
    """Mean cross-entropy over the trained tokens of the last step, in nats a token."""


def imitate(
    model: Qwen3MoeForCausalLM,
    schools: Sequence[Demonstrator],
    rng: random.Random,
    num_steps: int,
    progress: Callable[[TinyProgress], None],
) -> None:
    """Train ``model`` in place for ``num_steps`` optimizer steps (AdamW), each on a batch of each school.

    The first 80 % of the steps show careful demonstrations, the rest careless ones: so the model has the skill, and a bad
    policy. ``rng`` draws them; with torch's random state and one thread it determines the result. ``progress`` is called
    about once a second, and after the last step.
    """
    batch_sizes = [_batch_size(school, rng) for school in schools]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, num_steps))
    started = reported = time.monotonic()
    for step in range(num_steps):
        careful = step < CAREFUL_SHARE * num_steps
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        # One forward per school: their episodes differ in length, and padding would cost more than it saves.
        for school, batch_size in zip(schools, batch_sizes, strict=True):
            loss += _learn(model, school.lessons(batch_size, rng, careful=careful)) / len(schools)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        now = time.monotonic()
        if now - reported >= 1.0 or step == num_steps - 1:
            progress(TinyProgress(step=step + 1, num_steps=num_steps, seconds=now - started, loss=loss))
            reported = now


def _batch_size(school: Demonstrator, rng: random.Random) -> int:
    return max(1, school.batch_tokens // max(len(lesson.ids) for lesson in school.lessons(32, rng, careful=True)))


def _learning_rate_factor(step: int, num_steps: int) -> float:
    decay_steps = DECAY_SHARE * num_steps
    return min(1.0, (step + 1) / WARMUP_STEPS, (num_steps - step) / decay_steps)


def _learn(model: Qwen3MoeForCausalLM, lessons: Sequence[Lesson]) -> float:
    """Add the gradient of the mean cross-entropy over the trained tokens of ``lessons``; return that mean."""
    length, pad_id = max(len(lesson.ids) for lesson in lessons), model.config.pad_token_id
    ids_BT = torch.tensor([lesson.ids + [pad_id] * (length - len(lesson.ids)) for lesson in lessons])
    labels_BT = torch.tensor([x.labels + [IGNORED_LABEL] * (length - len(x.labels)) for x in lessons])
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT[:, 1:].reshape(-1), ignore_index=IGNORED_LABEL
    )
    loss.backward()
    return float(loss.item())
