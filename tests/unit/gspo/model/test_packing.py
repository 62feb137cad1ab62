"""Sequences, packed micro-batches and their plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.model.micro_batches import plan_micro_batches
from gspo.model.packing import TrainGroup, TrainSequence, pack


def sequence(tokens: list[int], actions: list[int], **changes: Any) -> TrainSequence:
    """A sequence with the given action positions; log-prob, version and turn of each action tell its position."""
    mask = np.zeros(len(tokens), dtype=np.bool_)
    mask[actions] = True
    positions = np.arange(len(tokens))
    fields: dict[str, Any] = {
        "token_ids": np.array(tokens, dtype=np.int64),
        "action_mask": mask,
        "behaviour_logprobs": np.where(mask, -positions / 10, 0).astype(np.float32),
        "versions": np.where(mask, positions % 2, -1).astype(np.int64),
        "turn_ids": np.where(mask, positions // 3, -1).astype(np.int32),
        "advantages": np.where(mask, positions, 0).astype(np.float32),
        "temperature": 1.0,
    }
    return TrainSequence(**(fields | changes))


def test_each_index_describes_the_token_that_follows_it() -> None:
    first = sequence([5, 6, 7], [1, 2], temperature=0.5)
    second = sequence([8, 9, 10, 11], [2])
    packed = pack([first, second], policy_version=3)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.cu_seqlens == (0, 3, 7)
    assert packed.targets_T.tolist() == [6, 7, 0, 9, 10, 11, 0]
    assert packed.mask_T.tolist() == [True, True, False, False, True, False, False]
    torch.testing.assert_close(packed.behaviour_T, torch.tensor([-0.1, -0.2, 0, 0, -0.2, 0, 0]))
    assert packed.advantages_T.tolist() == [1, 2, 0, 0, 2, 0, 0]
    assert packed.sequence_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert packed.turn_ids_T.tolist() == [0, 0, -1, -1, 0, -1, -1]
    assert packed.temperatures_T.tolist() == [0.5, 0.5, 0.5, 1, 1, 1, 1]
    assert packed.versions_T.tolist() == [1, 0, -1, -1, 0, -1, -1]
    assert (packed.num_sequences, packed.num_tokens, packed.is_empty) == (2, 7, False)


def test_experts_of_a_sampled_token_stand_at_the_token_that_predicts_it() -> None:
    first = sequence([5, 6, 7], [1, 2], experts=np.array([[[1, 0]], [[2, -1]]], dtype=np.int16))
    packed = pack([first, sequence([8, 9, 10, 11], [2])], policy_version=3)
    assert packed.experts_TLK is not None
    assert packed.experts_TLK[:, 0].tolist() == [[1, 0], [2, -1], *[[-1, -1]] * 5]
    assert pack([sequence([8, 9, 10, 11], [2])], policy_version=3).experts_TLK is None
    with pytest.raises(ValueError, match=r"experts of \[\(1, 2\), \(1, 3\)\] .* those of one model"):
        pack([first, sequence([8, 9], [1], experts=np.zeros((1, 1, 3), np.int16))], policy_version=3)
    with pytest.raises(ValueError, match=r"experts is \[2, 1, 3\]; it must be \[1, layers, experts per token\]"):
        sequence([8, 9], [1], experts=np.zeros((2, 1, 3), np.int16))


def test_a_packed_batch_remembers_where_its_sequences_stand_in_the_mini_batch() -> None:
    packed = pack([sequence([1, 2], [1]), sequence([3, 4], [1])], policy_version=1, sequence_indices=[7, 2])
    assert packed.sequence_indices == (7, 2)


def test_values_off_the_actions_never_reach_a_packed_batch() -> None:
    noisy = sequence([1, 2, 3], [2], behaviour_logprobs=np.array([-9, -9, -0.5], dtype=np.float32))
    assert pack([noisy], policy_version=1).behaviour_T.tolist() == [0, -0.5, 0]


def test_nothing_packs_to_a_dummy_that_counts_no_tokens() -> None:
    packed = pack([], policy_version=0)
    assert packed.is_empty
    assert packed.num_tokens == 0
    assert packed.input_ids.shape == (1, 1)
    assert not packed.mask_T.any()


def test_a_sequence_without_actions_is_legal() -> None:
    packed = pack([sequence([1, 2, 3], [])], policy_version=0)
    assert packed.num_sequences == 1
    assert not packed.mask_T.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": np.array([True, False, True])}, "index 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"behaviour_logprobs": np.array([0, 0, np.nan], dtype=np.float32)}, r"behaviour_logprobs\[2\] is nan"),
        ({"behaviour_logprobs": np.array([0, 0, 0.5], dtype=np.float32)}, "at most 0"),
        ({"behaviour_logprobs": np.zeros(3)}, "behaviour_logprobs is float64"),
        ({"advantages": np.array([0, 0, np.inf], dtype=np.float32)}, r"advantages\[2\] is inf"),
        ({"versions": np.array([-1, -1, -1])}, "versions must be"),
        ({"versions": np.array([-1, 0, 0])}, "versions must be"),
        ({"turn_ids": np.array([-1, -1, -1], dtype=np.int32)}, "turn_ids must be"),
        ({"turn_ids": np.array([-1, -1], dtype=np.int32)}, r"turn_ids is int32\[2\]"),
        ({"token_ids": np.array([1, 2, -3])}, "token_ids holds -3"),
        ({"token_ids": np.array([1])}, "1 tokens"),
    ],
)
def test_a_sequence_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(sequence([1, 2, 3], [2]), **changes)


def test_packing_refuses_missing_advantages_and_tokens_from_the_future() -> None:
    with pytest.raises(ValueError, match="sequence 4 has no advantages"):
        pack([sequence([1, 2], [1], advantages=None)], policy_version=1, sequence_indices=[4])
    with pytest.raises(ValueError, match="version 1, newer than the learner's 0"):
        pack([sequence([1, 2], [1])], policy_version=0)


def test_a_group_with_missing_rewards_is_refused() -> None:
    members = (sequence([1, 2], [1]), sequence([1, 3], [1]))
    for rewards in ([1.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="group g: rewards"):
            TrainGroup(group_id="g", sequences=members, rewards=np.array(rewards))
    with pytest.raises(ValueError, match="turn_rewards needs 2"):
        TrainGroup(group_id="g", sequences=members, rewards=np.zeros(2), turn_rewards=(np.zeros(1),))


@given(
    lengths=st.lists(st.integers(2, 60), max_size=40),
    max_tokens=st.integers(1, 100),
    num_ranks=st.integers(1, 5),
)
def test_every_sequence_is_planned_once_within_the_budget_and_ranks_stay_in_step(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    plan = plan_micro_batches(lengths, max_tokens, num_ranks)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    flat = [index for rank in plan for micro_batch in rank for index in micro_batch]
    assert sorted(flat) == list(range(len(lengths)))
    for rank in plan:
        for micro_batch in rank:
            assert len(micro_batch) <= 1 or sum(lengths[index] for index in micro_batch) <= max_tokens
    assert plan == plan_micro_batches(lengths, max_tokens, num_ranks)


def test_ranks_get_like_loads_in_every_round() -> None:
    lengths = [90, 10, 80, 20, 70, 30, 60, 40]
    plan = plan_micro_batches(lengths, 100, 2)
    loads = [[sum(lengths[index] for index in micro_batch) for micro_batch in rank] for rank in plan]
    assert loads == [[100, 100], [100, 100]]


def test_even_loads_give_way_to_the_budget() -> None:
    # Level loads would be 3 + 2 + 2 and 3 + 2, and 7 is above the budget.
    assert plan_micro_batches([3, 3, 2, 2, 2], 6, 1) == [[[0, 1], [2, 3, 4]]]


def test_a_rank_without_sequences_gets_an_empty_micro_batch() -> None:
    assert plan_micro_batches([5], 10, 3) == [[[0]], [[]], [[]]]


def test_a_sequence_above_the_budget_travels_alone_and_one_above_the_maximum_is_refused() -> None:
    assert sorted(plan_micro_batches([50, 4, 5], 10, 1)[0]) == [[0], [1, 2]]
    with pytest.raises(ValueError, match="sequence 0 has 50 tokens, above max_sequence_tokens = 49"):
        plan_micro_batches([50, 4], 10, 1, max_sequence_tokens=49)
