"""One training of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo.model.packing import BatchGroup, TrainGroup, pack
from gspo.settings import Objective
from gspo_services.learner.batch_run import Trackers, TrainingEngine
from gspo_services.learner.planned_batch import BatchSettings, plan_batch
from gspo_services.learner.token_dump import TokenDump
from gspo_services.learner.trainer import BatchReport, train_batch
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


def train(
    engine: TrainingEngine,
    groups: Sequence[BatchGroup],
    objective: Objective = WIDE,
    *,
    policy_version: int = 0,
    num_mini_batches: int = 1,
    trackers: Trackers | None = None,
    token_dump: TokenDump | None = None,
    **settings: Any,
) -> BatchReport:
    """Plan the groups as one batch, and train it. ``settings``: more of ``BatchSettings``."""
    chosen = BatchSettings(mini_batches=num_mini_batches, balances_load=engine.balances_load, **settings)
    batch = plan_batch(engine, groups, policy_version, objective, chosen)
    return train_batch(engine, batch, Trackers() if trackers is None else trackers, token_dump)
