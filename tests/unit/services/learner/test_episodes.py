"""Episodes of several sequences: one advantage, one normaliser, one member of the group, whatever they are split into."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.model.packing import TrainGroup
from gspo.options.overlong import overlong
from gspo_services.learner.advantages import AdvantageSettings, sequences_with_advantages
from gspo_services.learner.plan import BatchRows
from tests.support.engines.bigram_engine import BigramEngine
from tests.support.learner.trained import WIDE, own_logprobs, train
from tests.support.loss.sequences import random_groups

NOISE = 1.0
COUNTS = ((2, 1, 3), (1, 1, 1), (4, 1, 2))


def several(engine: BigramEngine, counts: tuple[tuple[int, ...], ...] = COUNTS, seed: int = 1) -> list[TrainGroup]:
    """Groups whose episodes have as many sequences as ``counts`` says; turn numbers go on from sequence to sequence."""
    groups = []
    for index, (of_group, flat) in enumerate(
        zip(counts, (random_groups(1, sum(each), seed=seed + i)[0] for i, each in enumerate(counts)), strict=True)
    ):
        (noisy,) = own_logprobs(engine, [flat], noise=NOISE)
        sequences, num_turns, at = [], [], 0
        for count in of_group:
            first = 0
            for sequence in noisy.sequences[at : at + count]:
                sequences.append(
                    replace(
                        sequence, turn_ids=np.where(sequence.action_mask, sequence.turn_ids + first, -1).astype(np.int32)
                    )
                )
                first += int(sequence.turn_ids.max()) + 1
            at += count
            num_turns.append(first)
        numbers = np.random.default_rng(seed + index)
        groups.append(
            TrainGroup(
                group_id=f"group-{index}",
                sequences=tuple(sequences),
                rewards=numbers.random(len(of_group)),
                turn_rewards=tuple(numbers.random(num) for num in num_turns),
                sequences_per_episode=of_group,
            )
        )
    return groups


def oracle_gradient(engine: BigramEngine, groups: list[TrainGroup]) -> torch.Tensor:
    """J = 1/N sum_i 1/n_i sum over the sequences of episode i, sum over t of min(s A, clip(s) A), in float64 and loops."""
    table = engine.table.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mean, deviation = group.rewards.mean(), group.rewards.std(ddof=1)
        at = 0
        for episode, count in enumerate(group.sequences_per_episode or ()):
            advantage = (group.rewards[episode] - mean) / (deviation + 1e-6)
            members = group.sequences[at : at + count]
            at += count
            n_i = sum(member.num_action_tokens for member in members)
            for member in members:
                places = np.flatnonzero(member.action_mask)
                logp = torch.log_softmax(table, -1)[member.token_ids[places - 1], member.token_ids[places]]
                mu = torch.from_numpy(member.behaviour_logprobs[places]).double()
                log_s = float((logp.detach() - mu).mean())
                clipped = log_s > math.log(1.19) if advantage > 0 else log_s < math.log(0.9)
                if not clipped:
                    total = total + (logp * math.exp(log_s) * advantage).sum() / n_i
    (gradient,) = torch.autograd.grad(-total / sum(group.num_episodes for group in groups), table)
    return gradient


@pytest.mark.parametrize("max_tokens_per_micro_batch", [10, 60, 10_000])
def test_the_step_is_that_of_the_formula_also_where_an_episode_is_split_over_micro_batches(
    max_tokens_per_micro_batch: int,
) -> None:
    engine = BigramEngine(max_tokens_per_micro_batch=max_tokens_per_micro_batch)
    groups = several(engine)
    expected = oracle_gradient(engine, groups)
    report = train(engine, groups)
    torch.testing.assert_close(engine.gradients[0].double(), expected, rtol=1e-4, atol=1e-6)
    assert 0.1 < report.metrics["clip_fraction/all"] < 0.9


def test_one_sequence_per_episode_is_what_it_was_bit_for_bit() -> None:
    groups = own_logprobs(BigramEngine(), random_groups(4, 3, seed=2), noise=NOISE)
    told = [replace(group, sequences_per_episode=(1, 1, 1)) for group in groups]
    engines = BigramEngine(), BigramEngine()
    reports = [train(engine, each, num_mini_batches=2) for engine, each in zip(engines, (groups, told), strict=True)]
    assert reports[0].metrics == reports[1].metrics
    assert torch.equal(engines[0].table, engines[1].table)


@given(
    counts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_all_sequences_of_an_episode_share_its_advantage(counts: tuple[tuple[int, ...], ...], seed: int) -> None:
    groups = several(BigramEngine(), counts, seed)
    flat = [episode for group in counts for episode, count in enumerate(group) for _ in range(count)]
    sequences, group_ids = sequences_with_advantages(groups, AdvantageSettings())
    assert group_ids.tolist() == [index for index, group in enumerate(counts) for _ in range(sum(group))]
    plain = [
        TrainGroup(group_id="plain", sequences=group.sequences[: group.num_episodes], rewards=group.rewards)
        for group in groups
    ]
    expected = [member.advantages.max() for member in sequences_with_advantages(plain, AdvantageSettings())[0]]  # type: ignore[union-attr]
    lowest = [member.advantages.min() for member in sequences_with_advantages(plain, AdvantageSettings())[0]]  # type: ignore[union-attr]
    of_episode = [up if up > 0 else down for up, down in zip(expected, lowest, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(group) for group in counts])])[group_ids]
    for sequence, start, episode in zip(sequences, starts.tolist(), flat, strict=True):
        assert sequence.advantages is not None
        assert set(sequence.advantages[sequence.action_mask].tolist()) == {float(of_episode[start + episode])}


def test_a_turns_advantage_reaches_its_tokens_in_whichever_sequence_it_lies() -> None:
    groups = several(BigramEngine())
    trained, _ = sequences_with_advantages(groups, AdvantageSettings(advantage="turn", normalise_by_std=False))
    values: dict[tuple[int, int], set[float]] = {}
    for sequence, episode in zip(trained, BatchRows.of(groups).episode_ids.tolist(), strict=True):
        assert sequence.advantages is not None
        for turn in set(sequence.turn_ids[sequence.action_mask].tolist()):
            values.setdefault((episode, turn), set()).update(sequence.advantages[sequence.turn_ids == turn].tolist())
    assert all(len(each) == 1 for each in values.values())
    assert len(values) == sum(len(rewards) for group in groups for rewards in group.turn_rewards or ())


def test_an_episode_is_overlong_when_one_of_its_sequences_is() -> None:
    groups = several(BigramEngine(), ((2, 2, 2, 2, 2, 2),))
    lengths = [sequence.num_tokens for sequence in groups[0].sequences]
    limit = sorted(lengths)[-2]
    trained, _ = sequences_with_advantages(groups, AdvantageSettings(max_tokens=max(lengths), overlong_filter_tokens=limit))
    too_long = overlong(np.array(lengths).reshape(-1, 2).max(axis=1), max_tokens=max(lengths), filter_tokens=limit)
    silent = [not np.any(member.advantages) for member in trained]
    assert silent == np.repeat(too_long, 2).tolist()
    assert 0 < sum(silent) < len(silent)


def test_a_penalty_in_the_reward_is_that_of_all_sequences_of_the_episode() -> None:
    engine = BigramEngine()
    groups = several(engine)
    with torch.no_grad():
        engine._start_table.mul_(0.7)
    objective = replace(WIDE, kl_coefficient=0.5, kl_in="reward")
    report = train(engine, groups, objective)
    sums = []
    for group in groups:
        for member in group.sequences:
            places = np.flatnonzero(member.action_mask)
            pair = member.token_ids[places - 1], member.token_ids[places]
            own, start = (torch.log_softmax(t.detach(), -1)[pair] for t in (BigramEngine().table, engine._start_table))
            difference = (start - own).double()
            estimators = {"k1": -difference, "k2": difference.square() / 2, "k3": difference.exp() - 1 - difference}
            sums.append(float(estimators[objective.kl_estimator].sum()))
    num_episodes = sum(group.num_episodes for group in groups)
    assert report.metrics["kl_penalty"] == pytest.approx(0.5 * sum(sums) / num_episodes, rel=1e-4)


@pytest.mark.parametrize("counts", [(2, 1), (1, 1, 1, 0), (), (2, 2)])
def test_episodes_that_do_not_add_up_are_refused(counts: tuple[int, ...]) -> None:
    (group,) = random_groups(1, 3, seed=0)
    with pytest.raises(
        ValueError, match=r"sequences_per_episode is .*give at least 1 for each episode|give 2 finite values"
    ):
        replace(group, sequences_per_episode=counts, turn_rewards=None)
