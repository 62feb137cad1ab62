"""Scores an answer by the verifier of its task's generator. Only reward workers import this: the package takes seconds."""

from __future__ import annotations

from typing import Any

import msgspec

from gspo_services.tasks.gym.asking import Generator
from gspo_services.tasks.gym.forked import in_a_fork
from gspo_services.tasks.gym.library import dataset_of, entry_of


def score(answer: str | None, task: dict[str, Any], cpu_s: float) -> dict[str, float]:
    """The verifier's score in "score", 0 where it has none; and 1 in "no_answer", "unscored" or "too_slow" where that is so.

    ``answer`` None: the policy gave none, and the verifier is told so. ``cpu_s``: processor seconds for the verifier.
    unscored: it raised or ended, or its score is no finite number. Raises: ValueError for a verifier that does so with its
    own answer, too, and for a task that is none.
    """
    generator = Generator(name=task["generator"], parameters=msgspec.json.decode(task["parameters"]))
    dataset = dataset_of(generator, task["level"])
    entry = entry_of(task["question"], task["entry"])
    verdict = in_a_fork(lambda: float(dataset.score(answer, entry)), cpu_s)
    own = entry.get("answer")
    if verdict.failure == "unscored" and own is not None:
        if in_a_fork(lambda: float(dataset.score(own, entry)), cpu_s).failure == "unscored":
            raise ValueError(f"the verifier of {generator.name!r} does not score its own answer, {str(own)[:100]!r}")
    return {
        "score": verdict.score,
        "no_answer": float(answer is None),
        "unscored": float(verdict.failure == "unscored"),
        "too_slow": float(verdict.failure == "too_slow"),
    }
