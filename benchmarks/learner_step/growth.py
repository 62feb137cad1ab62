"""How the learner's speed grows with the size of a micro-batch and of the model, compared with the bare step."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks.learner_step.batches import groups_of_lengths, long_tailed_lengths, num_tokens
from benchmarks.learner_step.measure import speed_ratio, summary, take_turns
from benchmarks.learner_step.models import MEDIUM, Shape, num_parameters
from benchmarks.learner_step.steps import Bare, Learner

BASE = Shape("growth", vocabulary=1024, hidden=96, layers=2, heads=3, experts=8, expert_hidden=96)
SEQUENCES, LONGEST, BUDGET, EFFICIENCY = 32, 256, 2048, 0.3

VARIANTS: dict[str, list[tuple[Any, Shape, int, int]]] = {
    "most tokens of a micro-batch": [(budget, BASE, budget, SEQUENCES) for budget in (256, 512, 1024, 2048, 4096)],
    "layers": [(layers, replace(BASE, layers=layers), BUDGET, SEQUENCES) for layers in (1, 2, 4, 8)],
    "hidden size": [
        (hidden, replace(BASE, hidden=hidden, expert_hidden=hidden, heads=hidden // 32), BUDGET, SEQUENCES)
        for hidden in (64, 128, 256)
    ],
    "vocabulary": [
        (vocabulary, replace(BASE, vocabulary=vocabulary), BUDGET, SEQUENCES) for vocabulary in (1024, 8192, 32_768)
    ],
    # The optimizer works per parameter and step: this shows when a step has few tokens for its parameters.
    "sequences of a step": [(sequences, MEDIUM, BUDGET, sequences) for sequences in (16, 64, 192)],
}
"""The growing quantities: their values, each with the model, the most tokens of a micro-batch, and how many sequences."""


def growth(rounds: int, *, limit_s: float) -> list[dict[str, Any]]:
    """Return a row per value, float32."""
    rows = []
    for what, variants in VARIANTS.items():
        for value, shape, budget, sequences in variants:
            print(f"growth: {what} {value} ...", file=sys.stderr, flush=True)
            groups = groups_of_lengths(long_tailed_lengths(sequences, LONGEST, EFFICIENCY), shape.vocabulary)
            learner, bare = Learner(shape, "float32", budget), Bare(shape, "float32", budget)
            steps = {"learner": learner.step(groups), "bare": bare.step(groups, with_adam=True)}
            costs = take_turns(steps, rounds, limit_s=limit_s)
            rows.append(
                {
                    "what": what,
                    "value": value,
                    "parameters": num_parameters(bare.model),
                    "learner": summary(costs["learner"], num_tokens(groups)),
                    "bare": summary(costs["bare"], num_tokens(groups)),
                    "ratio": speed_ratio(costs["learner"], costs["bare"]),
                }
            )
    return rows
