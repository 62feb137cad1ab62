"""Scores an answer by the verifier of its task's generator. Only reward workers import this: the package takes seconds."""

from __future__ import annotations

from typing import Any

import msgspec

from gspo_services.tasks.gym.asking import Generator
from gspo_services.tasks.gym.forked import scored
from gspo_services.tasks.gym.library import GymDataset, dataset_of, entry_of


def score(answer: str | None, task: dict[str, Any], cpu_s: float) -> dict[str, float]:
    """The verifier's score in "score", 0 where it has none; and 1 in "no_answer", "unscored" or "too_slow" where that is so.

    ``answer`` None: the policy gave none, and the verifier is told so. ``cpu_s``: processor seconds for the verifier.
    unscored: it raised or ended, or its score is no finite number. Raises: ValueError for a verifier that does so with its
    own answer, too, and for a task that is none.
    """
    generator = Generator(name=task["generator"], parameters=msgspec.json.decode(task["parameters"]))
    dataset = dataset_of(generator, task["level"])
    entry = entry_of(task["question"], task["entry"])
    verdict = scored(lambda: float(dataset.score(answer, entry)), cpu_s)
    if verdict.failure == "unscored" and not _scores_its_own(dataset, entry, cpu_s):
        raise ValueError(f"the verifier of {generator.name!r} does not score its own answer, {str(entry['answer'])[:100]!r}")
    return {
        "score": verdict.score,
        "no_answer": float(answer is None),
        "unscored": float(verdict.failure == "unscored"),
        "too_slow": float(verdict.failure == "too_slow"),
    }


def _scores_its_own(dataset: GymDataset, entry: dict[str, Any], cpu_s: float) -> bool:
    """Whether a verifier scores the answer that its generator gives; in doubt it does."""
    own = entry.get("answer")
    return own is None or scored(lambda: float(dataset.score(own, entry)), cpu_s).failure != "unscored"
