"""A run's first batch is refused before its step where engines sampled it from another policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gspo.model.packing import TrainGroup
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.first_look import FirstLook, OtherPolicyError
from gspo_services.shared.settings.sections import Learner, Model, Settings
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.learner.training_groups import random_groups

PROXIMAL = replace(WIDE, anchor="proximal")


def sampled(engine: BigramEngine, moved: float, share: float = 1.0) -> list[TrainGroup]:
    """Groups whose engine reported log-probs that are lower by ``moved`` for a share of the tokens."""
    rng = np.random.default_rng(1)
    groups = own_logprobs(engine, random_groups(8, 4, seed=5))

    def told(sequence: Any) -> Any:
        where = sequence.action_mask & (rng.random(sequence.num_tokens) < share)
        lower = np.where(where, sequence.behaviour_logprobs - moved, sequence.behaviour_logprobs)
        return replace(sequence, behaviour_logprobs=lower.astype(np.float32))

    return [replace(group, sequences=tuple(map(told, group.sequences))) for group in groups]


@pytest.mark.parametrize("objective", [WIDE, PROXIMAL])
@pytest.mark.parametrize(("far", "moved"), [(1e-3, 2e-3), (0.25, 0.3)])
def test_a_first_batch_of_another_policy_is_refused_before_the_step(objective: Any, far: float, moved: float) -> None:
    engine = BigramEngine()
    before, trackers = engine.table.clone(), Trackers(first_look=FirstLook(far=far))
    said = rf"of \d+ tokens .* log-probs more than {far:g} away from its own, which are higher by {moved:g}.*no step"
    with pytest.raises(OtherPolicyError, match=said):
        train(engine, sampled(engine, moved), objective, num_mini_batches=2, trackers=trackers)
    assert torch.equal(engine.table, before)
    assert not trackers.mismatch.has_measured


@pytest.mark.parametrize("objective", [WIDE, PROXIMAL])
@pytest.mark.parametrize(("moved", "share"), [(0.9e-3, 1.0), (1.0, 0.05)])
def test_rounding_and_a_few_experts_that_it_chose_are_trained_on(objective: Any, moved: float, share: float) -> None:
    engine, looked = BigramEngine(), BigramEngine()
    plain = train(engine, sampled(engine, moved, share), objective, num_mini_batches=2)
    trackers = Trackers(first_look=FirstLook(far=1e-3))
    found = train(looked, sampled(looked, moved, share), objective, num_mini_batches=2, trackers=trackers)
    assert torch.equal(engine.table, looked.table)
    assert found.metrics == plain.metrics | {"mismatch_far": 1e-3}


def test_only_the_first_batch_and_only_tokens_of_its_own_weights_count() -> None:
    engine = BigramEngine()
    trackers = Trackers(first_look=FirstLook(far=1e-3))
    train(engine, sampled(engine, 1.0), policy_version=1, trackers=trackers)
    assert not trackers.mismatch.has_measured
    train(engine, sampled(engine, 0.0), trackers=trackers)
    assert trackers.mismatch.has_measured
    # A run in bfloat16 may grow noisy: the doctor says so, and nobody is stopped by it.
    train(engine, sampled(engine, 1.0), trackers=trackers)


@pytest.mark.parametrize(
    ("learner", "engine", "device", "far"),
    [
        ("float32", "float32", "cpu", 1e-3), ("float32", "float32", "cuda", 1e-2), ("float32", "bfloat16", "cuda", 0.25),
        ("bfloat16", "bfloat16", "cpu", 0.25),
    ],
)  # fmt: skip
def test_what_is_far_depends_on_the_less_precise_side(learner: Any, engine: Any, device: str, far: float) -> None:
    settings = Settings(learner=Learner(dtype=learner), model=Model(dtype=engine))
    assert FirstLook.of(settings, device).far == far
