"""Group-relative advantages by sequence and by turn, and their expansion to tokens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.advantages import (
    group_advantages,
    sequence_values_to_tokens,
    turn_advantages,
    turn_values_to_tokens,
)


@given(
    rows=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 7.0])), max_size=30),
    normalise_std=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_advantages_are_relative_to_the_group_in_any_order_of_members(
    rows: list[tuple[str, float]], normalise_std: bool
) -> None:
    result = group_advantages([r for _, r in rows], [g for g, _ in rows], normalise_std=normalise_std, eps=1e-6)
    groups = {g: np.array([r for h, r in rows if h == g]) for g, _ in rows}
    for i, (g, reward) in enumerate(rows):
        members = groups[g]
        if np.ptp(members) == 0:
            assert result.advantages_M[i].item() == 0.0
            assert result.zero_advantage_M[i].item()
            continue
        scale = members.std(ddof=1) + 1e-6 if normalise_std else 1.0
        assert result.advantages_M[i].item() == pytest.approx((reward - members.mean()) / scale, rel=1e-5, abs=1e-6)
        assert not result.zero_advantage_M[i].item()
    assert result.num_groups == len(groups)
    assert result.num_zero_advantage_groups == sum(np.ptp(members) == 0 for members in groups.values())


def test_torch_numpy_and_lists_give_the_same_advantages() -> None:
    rewards, groups = [0.0, 1.0, 1.0, 0.5], [3, 3, 9, 9]
    expected = [-(0.5**0.5), 0.5**0.5, 0.5**0.5, -(0.5**0.5)]
    for result in (
        group_advantages(rewards, groups, eps=0.0),
        group_advantages(np.array(rewards, dtype=np.float32), np.array(groups), eps=0.0),
        group_advantages(torch.tensor(rewards, dtype=torch.bfloat16), torch.tensor(groups), eps=0.0),
    ):
        assert result.advantages_M.dtype == torch.float32
        assert result.advantages_M.tolist() == pytest.approx(expected)


def test_equal_rewards_give_exactly_zero_even_without_eps() -> None:
    result = group_advantages([0.1] * 3 + [0.1, 0.3], [0] * 3 + [1] * 2, eps=0.0)
    assert result.advantages_M[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.zero_advantage_M.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_missing_reward_is_refused_with_its_index(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"rewards_M\[2\] is {bad}"):
        group_advantages([0.0, 1.0, bad], [0, 0, 0])
    with pytest.raises(ValueError, match=rf"turn_rewards\[1\]\[0\] is {bad}"):
        turn_advantages([[0.0], [bad]], [0, 0])


def test_another_number_of_group_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="one id for each of 3 trajectories"):
        group_advantages([0.0, 1.0, 1.0], [0, 0])


def test_group_ids_may_be_a_list_of_tensors_or_of_numbers_and_a_tensor_of_another_shape_is_refused() -> None:
    rewards, ids = [1.0, 0.0, 3.0, 5.0], torch.tensor([0, 0, 1, 1])
    expected = group_advantages(rewards, [0, 0, 1, 1])
    for given_ids in (ids, list(ids), list(ids.numpy()), ["a", "a", "b", "b"]):
        assert torch.equal(group_advantages(rewards, given_ids).advantages_M, expected.advantages_M)
    turns = [[each] for each in rewards]
    of_turns, of_tensors = (turn_advantages(turns, each, credit="per_turn") for each in ([0, 0, 1, 1], list(ids)))
    assert torch.equal(torch.cat(of_tensors.advantages), torch.cat(of_turns.advantages))
    with pytest.raises(ValueError, match=r"group_ids_M has shape \(4, 1\); give a flat vector"):
        group_advantages(rewards, ids[:, None])


def test_turns_are_compared_with_the_same_turn_of_the_group() -> None:
    result = turn_advantages(
        [[0.0, 1.0], [1.0, 0.0], [5.0], [2.0, 2.0, 9.0]], [0, 0, 1, 0], credit="per_turn", normalise_std=False
    )
    assert [part.tolist() for part in result.advantages] == [[-1.0, 0.0], [0.0, -1.0], [0.0], [1.0, 1.0, 0.0]]
    assert result.zero_advantage_M.tolist() == [False, False, True, False]
    assert (result.num_groups, result.num_zero_advantage_groups) == (2, 1)


def test_return_to_go_credits_a_turn_with_the_discounted_rewards_that_follow() -> None:
    result = turn_advantages(
        [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [0, 0], credit="return_to_go", discount=0.5, normalise_std=False
    )
    assert [part.tolist() for part in result.advantages] == [[0.125, 0.25, 0.5], [-0.125, -0.25, -0.5]]


def by_hand(rewards: list[list[float]], roles: list[list[int]], groups: list[int], credit: str) -> list[list[float]]:
    """The advantages by the words of the definition: each role of each trajectory is a trajectory of its own."""
    own: dict[tuple[int, int], list[float]] = {}
    for i, (values, of) in enumerate(zip(rewards, roles, strict=True)):
        for value, role in zip(values, of, strict=True):
            own.setdefault((i, role), []).append(value)
    credited = {
        key: [sum(values)] * len(values)
        if credit == "role"
        else [sum(values[k:]) if credit == "return_to_go" else values[k] for k in range(len(values))]
        for key, values in own.items()
    }
    found: list[list[float]] = []
    for i, of in enumerate(roles):
        row = []
        for t, role in enumerate(of):
            k = of[:t].count(role)
            others = [
                credited[j, role][0 if credit == "role" else k]
                for j in range(len(rewards))
                if groups[j] == groups[i] and len(own.get((j, role), ())) > (0 if credit == "role" else k)
            ]
            spread = np.std(others, ddof=1) if len(others) > 1 and np.ptp(others) else math.inf
            row.append((credited[i, role][k] - float(np.mean(others))) / (spread + 1e-6))
        found.append(row)
    return found


@pytest.mark.parametrize("credit", ["return_to_go", "per_turn", "role"])
@given(
    trajectories=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), max_size=5),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_each_role_is_a_trajectory_of_its_own_and_is_compared_with_itself_alone(
    credit: Any, trajectories: list[tuple[int, list[tuple[int, float]]]]
) -> None:
    groups = [group for group, _ in trajectories]
    rewards = [[reward for _, reward in turns] for _, turns in trajectories]
    roles = [[role for role, _ in turns] for _, turns in trajectories]
    found = turn_advantages(rewards, groups, turn_roles=roles, credit=credit).advantages
    for own, expected in zip(found, by_hand(rewards, roles, groups, credit), strict=True):
        assert own.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_with_one_role_its_advantage_is_that_of_the_trajectory() -> None:
    rewards, groups = [[0.0, 1.0], [0.5], [0.25, 0.25, 0.0]], [0, 0, 0]
    whole = group_advantages([sum(each) for each in rewards], groups).advantages_M.tolist()
    by_role = turn_advantages(rewards, groups, credit="role").advantages
    assert [set(each.tolist()) for each in by_role] == [{value} for value in whole]


def test_sides_that_swap_their_rewards_are_told_apart() -> None:
    """In a game of two sides the rewards of an episode add up to nothing, whoever wins."""
    result = turn_advantages([[1.0, -1.0], [-1.0, 1.0]], [0, 0], turn_roles=[[0, 1], [0, 1]], credit="role")
    assert [[value > 0 for value in each.tolist()] for each in result.advantages] == [[True, False], [False, True]]
    assert result.num_zero_advantage_groups == 0


@pytest.mark.parametrize("roles", [[[0]], [[0, 1], [0]], [[[0]], [0]]])
def test_roles_that_are_not_those_of_the_turns_are_refused(roles: Any) -> None:
    with pytest.raises(ValueError, match="turn_roles has"):
        turn_advantages([[1.0], [2.0]], [0, 0], turn_roles=roles)


def test_with_one_turn_each_turn_advantages_are_sequence_advantages() -> None:
    rewards, groups = [0.0, 1.0, 0.25, 3.0, 3.0], [0, 0, 0, 1, 1]
    by_sequence = group_advantages(rewards, groups)
    by_turn = turn_advantages([[r] for r in rewards], groups)
    assert torch.cat(by_turn.advantages).tolist() == by_sequence.advantages_M.tolist()
    assert by_turn.zero_advantage_M.tolist() == by_sequence.zero_advantage_M.tolist()


def test_trajectories_without_turns_and_batches_without_trajectories_are_legal() -> None:
    result = turn_advantages([[], [1.0], []], [0, 0, 1])
    assert [part.tolist() for part in result.advantages] == [[], [0.0], []]
    assert result.num_zero_advantage_groups == 2
    assert turn_advantages([], []).advantages == []
    assert group_advantages([], []).num_groups == 0


@pytest.mark.parametrize("arguments", [{"credit": "monte_carlo"}, {"discount": 1.5}, {"discount": -0.1}])
def test_unknown_credit_and_impossible_discounts_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is"):
        turn_advantages([[1.0]], [0], **arguments)  # type: ignore[arg-type]


def test_values_reach_exactly_the_action_tokens_of_their_sequence_or_turn() -> None:
    mask_T = torch.tensor([False, True, True, False, True, True])
    ids_T = torch.tensor([-1, 0, 0, 0, 1, 1])
    turns_T = torch.tensor([-1, 0, 1, -1, 0, 2])
    by_sequence = sequence_values_to_tokens(torch.tensor([1.5, -2.0]), ids_T, mask_T)
    assert by_sequence.tolist() == [0.0, 1.5, 1.5, 0.0, -2.0, -2.0]
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    assert turn_values_to_tokens(values, ids_T, turns_T, mask_T).tolist() == [0.0, 1.0, 2.0, 0.0, 3.0, 5.0]


def test_tokens_without_a_value_are_refused_and_no_tokens_need_none() -> None:
    mask_T, ids_T = torch.tensor([True, True]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"turn_ids_T\[1\] is 1 but sequence 1 has values for 1 turns"):
        turn_values_to_tokens([torch.zeros(2), torch.zeros(1)], ids_T, torch.tensor([0, 1]), mask_T)
    with pytest.raises(ValueError, match=r"sequence_ids_T\[1\] is 1"):
        sequence_values_to_tokens(torch.zeros(1), ids_T, mask_T)
    nothing = torch.tensor([False, False])
    assert turn_values_to_tokens([], ids_T, ids_T, nothing).tolist() == [0.0, 0.0]
    assert sequence_values_to_tokens(torch.zeros(0), ids_T, nothing).tolist() == [0.0, 0.0]


def test_the_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards, groups = [1.0, 0.0, 4.0, 2.0, 6.0], [0, 0, 0, 1, 1]
    result = group_advantages(rewards, groups, baseline="leave_one_out", normalise_std=False)
    assert result.advantages_M.tolist() == [-1.0, -2.5, 3.5, -4.0, 4.0]


def test_partial_groups_are_baselined_by_the_members_that_are_there_and_one_member_has_zero_advantage() -> None:
    for baseline in ("mean", "leave_one_out"):
        result = group_advantages([1.0, 0.0, 5.0, 0.0, 0.0], ["a", "a", "b", "c", "c"], baseline=baseline)
        assert result.members_M.tolist() == [2, 2, 1, 2, 2]
        assert result.advantages_M[2:].tolist() == [0.0, 0.0, 0.0]
        assert result.zero_advantage_M.tolist() == [False, False, True, True, True]
        assert (result.num_groups, result.num_zero_advantage_groups, result.num_single_groups) == (3, 2, 1)


def test_leave_one_out_is_unbiased_for_any_number_of_members_and_the_mean_is_short_by_one_member() -> None:
    """Bernoulli rewards of a softmax policy with two actions: E[A_i * score_i] over all outcomes, exactly."""
    p = 0.3
    exact = p * (1 - p)  # d/dtheta of p = sigmoid(theta), with reward 1 for the first action
    for size in (2, 3, 5):
        expected = {"mean": 0.0, "leave_one_out": 0.0}
        for outcome in itertools.product([1.0, 0.0], repeat=size):
            probability = math.prod(p if action else 1 - p for action in outcome)
            for baseline in expected:
                result = group_advantages(outcome, [0] * size, baseline=baseline, normalise_std=False)
                scores = [action - p for action in outcome]
                terms = [a * s for a, s in zip(result.advantages_M.tolist(), scores, strict=True)]
                expected[baseline] += probability * sum(terms) / size
        assert expected["leave_one_out"] == pytest.approx(exact, rel=1e-6)
        assert expected["mean"] == pytest.approx(exact * (size - 1) / size, rel=1e-6)


def test_turns_have_the_same_choice_of_baseline() -> None:
    result = turn_advantages([[0.0], [4.0], [2.0]], [0, 0, 0], baseline="leave_one_out", normalise_std=False)
    assert torch.cat(result.advantages).tolist() == [-3.0, 3.0, 0.0]


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="baseline is 'median'; choose one of mean, leave_one_out"):
        group_advantages([0.0, 1.0], [0, 0], baseline="median")  # type: ignore[arg-type]
