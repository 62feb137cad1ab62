"""Rewards become advantages as docs/gspo.md says, with every option alone and in pairs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any, Final, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.advantages import group_advantages
from gspo.model.packing import TrainGroup, TrainSequence
from gspo.options.overlong import overlong, overlong_penalties
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable, sequences_with_advantages
from gspo_services.learner.plan import BatchRows
from gspo_services.shared.settings.sections import Settings
from tests.support.loss.oracle import OracleAdvantages, oracle_advantages
from tests.support.loss.sequences import random_sequence

LIMIT = 20

OPTIONS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "leave one out": ({"baseline": "leave_one_out"}, {"leave_one_out": True}),
    "no deviation": ({"normalise_by_std": False}, {"normalise": False}),
    "batch deviation": ({"std_over": "batch"}, {"over_batch": True}),
    "overlong shaping": ({"overlong_buffer_tokens": 8, "overlong_penalty": 0.5}, {"buffer": 8, "penalty": 0.5}),
    "overlong filter": ({"overlong_filter_tokens": 16}, {"filter": 16}),
}
"""What an option changes in the settings, and in the oracle."""

ALONE_AND_IN_PAIRS = [(), *((name,) for name in OPTIONS), *combinations(OPTIONS, 2)]


def group_of(index: int, rewards: list[float], lengths: list[int]) -> TrainGroup:
    members = tuple(random_sequence(length, seed=100 * index + i) for i, length in enumerate(lengths))
    turn_rewards = tuple(
        np.append(np.zeros(int(member.turn_ids.max())), reward) for member, reward in zip(members, rewards, strict=True)
    )
    return TrainGroup(group_id=f"g{index}", sequences=members, rewards=np.array(rewards), turn_rewards=turn_rewards)


def values_of(sequence: TrainSequence) -> set[float]:
    assert sequence.advantages is not None
    return set(sequence.advantages[sequence.action_mask].tolist())


MEMBER = st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(4, LIMIT))


@pytest.mark.parametrize("names", ALONE_AND_IN_PAIRS, ids=lambda names: " and ".join(names) or "defaults")
@given(batch=st.lists(st.lists(MEMBER, min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_the_advantages_are_the_oracles_alone_and_in_pairs(
    names: tuple[str, ...], batch: list[list[tuple[float, int]]]
) -> None:
    chosen: dict[str, Any] = {"max_tokens": LIMIT}
    expected: dict[str, Any] = {"n_max": LIMIT}
    for name in names:
        chosen |= OPTIONS[name][0]
        expected |= OPTIONS[name][1]
    groups = [group_of(i, [r for r, _ in members], [n for _, n in members]) for i, members in enumerate(batch)]
    ids = [i for i, members in enumerate(batch) for _ in members]
    rewards, lengths = [r for members in batch for r, _ in members], [n for members in batch for _, n in members]
    trained, _ = sequences_with_advantages(groups, AdvantageSettings(**chosen))
    oracle = oracle_advantages(OracleAdvantages(**expected), rewards, ids, lengths)
    for sequence, advantage in zip(trained, oracle, strict=True):
        assert list(values_of(sequence)) == pytest.approx([advantage], rel=1e-6, abs=1e-6)


def test_the_penalty_of_a_turn_belongs_to_the_last_and_a_filtered_trajectory_has_no_turn_left() -> None:
    """Three turns each; the last trajectory reaches the limit and the filter."""
    group = group_of(0, [1.0, 1.0, 0.0], [19, 19, 20])
    settings = AdvantageSettings(
        advantage="turn", normalise_by_std=False, max_tokens=20, overlong_buffer_tokens=10, overlong_filter_tokens=20
    )
    trained, _ = sequences_with_advantages([group], settings)
    last = [int(member.turn_ids.max()) for member in group.sequences]
    assert last == [2, 2, 2]
    returns = [1.0 - 0.9, 1.0 - 0.9, 0.0 - 1.0]
    for index in (0, 1):
        assert list(values_of(trained[index])) == pytest.approx([returns[index] - sum(returns) / 3])
    assert values_of(trained[2]) == {0.0}


@given(st.data(), st.sampled_from(["turn", "role"]), st.sampled_from(["group", "batch"]))
def test_turns_of_an_attempt_that_began_again_change_no_advantage(
    data: st.DataObject, advantage: Literal["turn", "role"], std_over: Literal["group", "batch"]
) -> None:
    """Wherever they are, also before and after all others, and whichever role played them."""
    chosen = AdvantageSettings(advantage=advantage, std_over=std_over, max_tokens=LIMIT, overlong_buffer_tokens=10)
    plain, disturbed, kept = [], [], []
    for number in range(2):
        size = data.draw(st.integers(2, 4))
        group = group_of(number, [0.0] * size, data.draw(st.lists(st.integers(9, LIMIT), min_size=size, max_size=size)))
        turns = [
            data.draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(lambda made: not all(made)))
            for _ in range(size)
        ]
        discarded = [np.array(each) for each in turns]
        rewards = [np.where(each, 0.0, data.draw(st.sampled_from([0.0, 1.0])) + np.arange(len(each))) for each in discarded]
        roles = [
            np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(each), max_size=len(each)))) for each in discarded
        ]
        disturbed.append(
            replace(group, turn_rewards=tuple(rewards), turn_roles=tuple(roles), turn_discarded=tuple(discarded))
        )
        alone = [each[~out] for each, out in zip(rewards, discarded, strict=True)]
        own_roles = [each[~out] for each, out in zip(roles, discarded, strict=True)]
        plain.append(replace(group, turn_rewards=tuple(alone), turn_roles=tuple(own_roles)))
        kept += [~each for each in discarded]
    found, expected = (AdvantageTable.of(BatchRows.of(groups), chosen).values for groups in (disturbed, plain))
    for value, own, is_kept in zip(found, expected, kept, strict=True):
        assert value[is_kept].tolist() == own.tolist()
        assert not value[~is_kept].any()


def test_dapos_penalty_falls_linearly_over_the_buffer() -> None:
    lengths = np.array([5, 12, 14, 16, 20, 23])
    assert overlong_penalties(lengths, max_tokens=20, buffer_tokens=8).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong(lengths, max_tokens=20, filter_tokens=16).tolist() == [False] * 3 + [True] * 3


def test_a_buffer_or_filter_beyond_the_limit_and_an_unknown_limit_are_refused() -> None:
    lengths = np.array([5])
    with pytest.raises(ValueError, match="buffer_tokens is 21; give a number from 1 to max_tokens, which is 20"):
        overlong_penalties(lengths, max_tokens=20, buffer_tokens=21)
    with pytest.raises(ValueError, match="filter_tokens is 21; give a number from 1 to max_tokens, which is 20"):
        overlong(lengths, max_tokens=20, filter_tokens=21)
    group = group_of(0, [1.0, 0.0], [8, 9])
    for chosen in ({"overlong_filter_tokens": 9}, {"overlong_buffer_tokens": 9}):
        with pytest.raises(ValueError, match="max_tokens is None; give the most tokens of a trajectory"):
            sequences_with_advantages([group], AdvantageSettings(**chosen))
    with pytest.raises(ValueError, match="std_over is 'run'; choose one of group, batch"):
        group_advantages([1.0, 0.0], [0, 0], std_over="run")  # type: ignore[arg-type]


def test_a_run_hands_its_settings_on() -> None:
    objective = {
        "advantage_baseline": "leave_one_out",
        "std_over": "batch",
        "overlong_buffer_tokens": 8,
        "overlong_penalty": 0.5,
        "overlong_filter_tokens": 100,
    }
    run = Settings.model_validate({"objective": objective, "sampling": {"max_tokens": 128}})
    assert AdvantageSettings.of(run) == AdvantageSettings(
        baseline="leave_one_out",
        std_over="batch",
        max_tokens=128,
        overlong_buffer_tokens=8,
        overlong_penalty=0.5,
        overlong_filter_tokens=100,
    )
    assert AdvantageSettings.of(Settings()) == AdvantageSettings(max_tokens=Settings().sampling.max_tokens)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"overlong_filter_tokens": 129}, "overlong_filter_tokens is 129 but sampling.max_tokens is 128: no trajectory"),
        ({"overlong_buffer_tokens": 200}, "overlong_buffer_tokens is 200 but sampling.max_tokens is 128: no trajectory"),
        ({"std_over": "batch", "normalise_by_std": False}, "which divides by no deviation. Set normalise_by_std = true"),
        ({"routing_replay_from": "engine"}, "replays nothing. Set routing_replay = true, or omit routing_replay_from"),
        ({"advantage": "turn", "kl_coefficient": 0.1, "kl_in": "reward"}, "Set kl_in = 'loss', or advantage = 'sequence'"),
    ],
)
def test_a_run_whose_settings_contradict_each_other_is_refused_with_the_way_out(
    objective: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.model_validate({"objective": objective, "sampling": {"max_tokens": 128}})


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"objective": {"advantage": "role"}}, "agent.roles is empty: name the roles"),
        ({"agent": {"roles": ["white", "white"]}}, "each once, of 1 to 32 letters"),
        ({"agent": {"roles": ["a.b"]}}, "each once, of 1 to 32 letters"),
        ({"agent": {"roles": [str(number) for number in range(17)]}}, "at most 16 names"),
        ({"agent": {"roles": ["a", "b"], "weights": {"a": 1.0}}}, "agent.roles have a reward each: remove one"),
        ({"agent": {"roles": ["a", "b"]}, "reward": {"group": "m:f"}}, "one reward in place of those of its roles"),
    ],
)
def test_roles_that_cannot_be_are_refused_with_the_way_out(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.model_validate(plain)
