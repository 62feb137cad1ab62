"""What the trainer makes of a batch's groups, rewards, versions and mismatch, for batches of any shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean, pvariance, stdev

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.calibration import LagCalibration
from gspo.mismatch import MismatchTracker
from gspo.model.packing import TrainGroup, TrainSequence, pack
from gspo.settings import Anchor, Objective
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.batch_run import Trackers
from gspo_services.learner.plan import MINI_BATCH_ORDER, deal_groups
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.loss.sequences import random_groups, random_sequence

DECAY = 0.9


def advantage_of(sequence: TrainSequence) -> float:
    assert sequence.advantages is not None
    (advantage,) = set(sequence.advantages[sequence.action_mask].tolist())
    return float(advantage)


def group_of(rewards: list[float], seed: int) -> TrainGroup:
    members = tuple(random_sequence(4 + index, seed + index) for index in range(len(rewards)))
    turn_rewards = tuple(np.full(int(member.turn_ids.max()) + 1, rewards[i]) for i, member in enumerate(members))
    return TrainGroup(group_id=f"group-{seed}", sequences=members, rewards=np.array(rewards), turn_rewards=turn_rewards)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, -3.0, 2.0**24]),
    scale=st.sampled_from([1.0, 2.0**-10, 2.0**10]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_a_sequences_advantage_is_that_of_its_own_group_whatever_the_sizes_of_the_others(
    sizes: list[int], offset: float, scale: float, seed: int
) -> None:
    """Groups may be partial, and their rewards may lie close together around any level."""
    numbers = np.random.default_rng(seed)
    rewards = [(offset + scale * numbers.integers(0, 9, size)).tolist() for size in sizes]
    groups = [group_of(values, 100 * index) for index, values in enumerate(rewards)]
    for credit in ("sequence", "turn"):
        sequences, group_ids = sequences_with_advantages(groups, AdvantageSettings(advantage=credit))  # type: ignore[arg-type]
        assert group_ids.tolist() == [index for index, size in enumerate(sizes) for _ in range(size)]
        if credit == "turn":
            continue
        expected = []
        for values in rewards:
            deviation = stdev(values) if len(values) > 1 else 0.0
            expected += [(reward - fmean(values)) / (deviation + 1e-6) if deviation else 0.0 for reward in values]
        assert [advantage_of(sequence) for sequence in sequences] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def measured_noise(engine: BigramEngine, groups: list[TrainGroup], version: int) -> list[float]:
    """Learner minus engine log-prob of every action token of ``version``, under the engine's present weights."""
    noise: list[float] = []
    for sequence in (member for group in groups for member in group.sequences):
        advantages = np.zeros(sequence.num_tokens, dtype=np.float32)
        packed = pack([sequence.with_advantages(advantages)], policy_version=version)
        fresh_T = packed.mask_T & (packed.versions_T == version)
        noise += (engine.logprobs(packed).logprobs_T - packed.behaviour_T)[fresh_T].tolist()
    return noise


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3, 6])
@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_sigma_is_that_of_the_weights_at_the_start_of_each_batch(anchor: Anchor, num_mini_batches: int) -> None:
    """The steps move the weights far: measured after any of them, the mismatch would be another. The behaviour anchor sees
    the start weights in the first mini-batch only, the proximal anchor in its pass over the whole batch."""
    engine = BigramEngine(learning_rate=20.0, max_tokens_per_micro_batch=50)
    trackers = Trackers(mismatch=MismatchTracker(decay=DECAY))
    objective = replace(WIDE, anchor=anchor, eps_low=0.19, eps_high=0.19)
    variance = 0.0
    for batch, noise in enumerate((0.05, 0.4, 0.1)):
        drawn = random_groups(6, 3, seed=20 + batch, versions=(max(batch - 1, 0), batch))
        groups = own_logprobs(engine, drawn, noise=noise)
        seen = groups if anchor == "proximal" else [groups[i] for i in deal_groups(groups, batch, num_mini_batches)[0]]
        at_start = pvariance(measured_noise(engine, seen, batch))
        variance = DECAY * variance + (1 - DECAY) * at_start if batch else at_start
        report = train(engine, groups, objective, policy_version=batch, num_mini_batches=num_mini_batches, trackers=trackers)
        assert report.metrics["mismatch_sigma"] == pytest.approx(variance**0.5, rel=1e-3)
        moved = pvariance(measured_noise(engine, groups, batch))
        assert moved != pytest.approx(at_start, rel=0.02), "the steps must move the weights for this to show anything"


@given(position=st.integers(0, 29), length=st.integers(3, 60), max_lag=st.integers(0, 3), excess=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_one_token_decides_whether_a_sequence_is_too_old(position: int, length: int, max_lag: int, excess: int) -> None:
    """Not the mean: a sequence that went on under new weights may have a mean lag near 0 and a token that is too old."""
    version = 10
    member = random_sequence(length, seed=length, versions=(version, version))
    actions = np.flatnonzero(member.action_mask)
    versions = member.versions.copy()
    versions[actions[position % len(actions)]] = version - max_lag - excess
    group = TrainGroup(group_id="g", sequences=(replace(member, versions=versions), member), rewards=np.array([0.0, 1.0]))
    engine = BigramEngine()

    step = partial(train, engine, [group], policy_version=version, max_lag=max_lag)
    if excess == 0:
        step()
        assert len(engine.gradients) == 1
        return
    with pytest.raises(ValueError, match=f"sequence 0 has a token of version {version - max_lag - excess},"):
        step()
    assert engine.gradients == []


def test_rewards_that_differ_in_the_ninth_digit_train_the_same_as_others() -> None:
    """Rewards keep their float64 on the way from the groups to the advantages."""
    gradients = []
    for level, unit in ((0.0, 1.0), (1e3, 1e-6)):
        engine = BigramEngine()
        groups = own_logprobs(engine, random_groups(2, 4, seed=30))
        ranked = [replace(g, rewards=level + unit * np.arange(4.0)) for g in groups]
        train(engine, ranked)
        gradients.append(engine.gradients[0])
    deviation = stdev([0.0, 1e-6, 2e-6, 3e-6])
    torch.testing.assert_close(gradients[1] * (1 + 1e-6 / deviation), gradients[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_the_calibration_learns_from_sequences_under_the_weights_of_the_batchs_start_only(anchor: Anchor) -> None:
    engine, calibration = BigramEngine(learning_rate=20.0, max_tokens_per_micro_batch=50), LagCalibration()
    groups = own_logprobs(engine, random_groups(6, 3, seed=30, versions=(1, 3)), noise=0.1)
    seen = groups if anchor == "proximal" else [groups[i] for i in deal_groups(groups, 4, 3)[0]]
    expected = []
    for sequence in (member for group in seen for member in group.sequences):
        packed = pack([sequence.with_advantages(np.zeros(sequence.num_tokens, dtype=np.float32))], policy_version=4)
        noise = (engine.logprobs(packed).logprobs_T - packed.behaviour_T)[packed.mask_T].tolist()
        expected.append((fmean((4 - packed.versions_T[packed.mask_T]).tolist()), len(noise), fmean(noise)))
    objective = replace(WIDE, anchor=anchor, eps_low=0.19, eps_high=0.19)
    train(engine, groups, objective, policy_version=4, num_mini_batches=3, trackers=Trackers(calibration=calibration))
    kept = [tuple(row[:3]) for row in calibration.state_dict()["sequences"]]
    assert sorted(kept) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in sorted(expected)]


def test_the_calibration_sees_every_lag_of_a_batch_that_comes_oldest_first_and_the_metrics_say_so() -> None:
    engine, calibration = BigramEngine(learning_rate=20.0), LagCalibration()
    step = partial(train, engine, num_mini_batches=4, trackers=Trackers(calibration=calibration))

    def batch(*oldest: int) -> list[TrainGroup]:
        drawn = [random_groups(12, 8, seed=30 + version, versions=(version, version)) for version in oldest]
        return own_logprobs(engine, [drawn[place // 4][place] for place in range(12)], noise=0.1)

    found = step(batch(2, 3, 4), policy_version=4).metrics
    assert [found[f"calibration_sequences/{lag}"] for lag in ("lag_0", "lag_1", "lag_2")] == [8, 8, 8]
    sigma, kept = found["mismatch_sigma"], calibration.num_sequences
    assert sigma > 0
    found = step(batch(4, 4, 5), policy_version=5).metrics
    assert [found[f"calibration_sequences/{lag}"] for lag in ("lag_0", "lag_1", "lag_2")] == [8, 16, 0]
    assert [found[f"calibration_age/{lag}"] for lag in ("lag_0", "lag_1", "lag_2")] == [0, 0, 1]
    assert calibration.num_sequences == {0: kept[0] + 8, 1: kept[1] + 16, 2: kept[2]}
    assert found["mini_batch_order"] == MINI_BATCH_ORDER


@pytest.mark.parametrize("bias", [-0.05, 0.001, 0.5])
def test_a_constant_bias_of_the_engine_is_measured_against_the_clip_range(bias: float) -> None:
    engine, calibration = BigramEngine(learning_rate=0.0), LagCalibration()
    groups = [
        replace(
            group,
            sequences=tuple(replace(s, behaviour_logprobs=s.behaviour_logprobs - np.float32(bias)) for s in group.sequences),
        )
        for group in own_logprobs(engine, random_groups(8, 4, seed=31), noise=0.0)
    ]
    objective = Objective(eps_low=0.01, eps_high=0.02)
    step = partial(train, engine, groups, trackers=Trackers(calibration=calibration))
    found = step(objective).metrics
    location = found["calibration_location/lag_0"]
    assert location == pytest.approx(bias / 2, rel=1e-4), "half of it, after 32 sequences"
    bound = found["clip_range_low/lag_0" if bias < 0 else "clip_range_high/lag_0"]
    assert found["calibration_bias/lag_0"] == pytest.approx(location / bound)
    assert (found["calibration_bias/lag_0"] > 1) == (bias != 0.001)
    proximal = replace(objective, anchor="proximal")
    assert not any("bias" in name for name in step(proximal).metrics)


def test_a_batch_is_clipped_by_the_calibration_of_the_batches_before_it() -> None:
    engine, calibration = BigramEngine(learning_rate=0.0), LagCalibration()
    objective = Objective(anchor="behaviour", clip_calibration="widen")
    groups = own_logprobs(engine, random_groups(8, 4, seed=31), noise=0.1)
    shares = []
    for _ in range(2):
        report = train(engine, groups, objective, trackers=Trackers(calibration=calibration))
        shares.append(report.metrics["clip_fraction/lag_0"])
        assert report.metrics["clip_range_high/lag_0"] > 0
    assert shares[1] < shares[0] - 0.1
