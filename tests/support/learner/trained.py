"""One training of a small model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gspo.mismatch import MismatchTracker
from gspo.model.packing import TrainGroup, pack
from gspo.settings import Objective
from gspo_services.learner.trainer import BatchReport, TrainingEngine, train_batch
from tests.support.engines.bigram_engine import BigramEngine

WIDE = Objective(eps_low=0.1, eps_high=0.19, anchor="behaviour", tis_mode="off")


def own_logprobs(engine: BigramEngine, groups: list[TrainGroup], noise: float = 0.0) -> list[TrainGroup]:
    """The groups with the engine's own log-probs as behaviour, plus noise."""
    generator = np.random.default_rng(3)
    result = []
    for group in groups:
        members = []
        for sequence in group.sequences:
            packed = pack([sequence.with_advantages(np.zeros(sequence.num_tokens, dtype=np.float32))], policy_version=9)
            logprobs = engine.logprobs(packed).logprobs_T.numpy()
            noisy = np.append(0, logprobs[:-1]) + noise * generator.standard_normal(sequence.num_tokens)
            behaviour = np.where(sequence.action_mask, np.minimum(noisy, 0), 0).astype(np.float32)
            members.append(replace(sequence, behaviour_logprobs=behaviour))
        result.append(replace(group, sequences=tuple(members)))
    engine.num_forward_passes = 0
    return result


def train(engine: TrainingEngine, groups: list[TrainGroup], objective: Objective = WIDE, **changes: Any) -> BatchReport:
    arguments: dict[str, Any] = {"policy_version": 0, "num_mini_batches": 1} | changes
    return train_batch(engine, groups, objective=objective, mismatch=MismatchTracker(), **arguments)
