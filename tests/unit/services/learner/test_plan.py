"""Every rank plans alike from lengths, and needs the tokens of its own sequences only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.model.packing import BatchGroup, BatchSequence, PackedBatch, TrainGroup
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable
from gspo_services.learner.broker.assembly import AbsentSequence
from gspo_services.learner.plan import PackedLater, own_micro_batches, planned_mini_batches, rows_of_rank, sum_over_sequences
from gspo_services.shared.settings.configuration import validated
from tests.support.loss.sequences import random_groups

VERSION = 50


@dataclass(frozen=True)
class Place:
    """One of several ranks."""

    rank: int
    world_size: int
    max_tokens_per_micro_batch: int = 40
    sequence_parallel: int = 1
    max_sequence_tokens: int | None = None


def settings_of(num_mini_batches: int, **objective: Any) -> Any:
    batch = {"mini_batches": num_mini_batches, "groups_per_batch": 12, "group_size": 4}
    return validated({"batch": batch, "objective": objective}, "test")


def test_ranks_that_share_sequences_have_the_same_ones_and_room_for_twice_as_many() -> None:
    lengths = [30, 25, 20, 20, 10, 5, 40, 38]
    shared = [own_micro_batches(Place(rank, 4, sequence_parallel=2), lengths) for rank in range(4)]
    assert shared == [own_micro_batches(Place(rank // 2, 2, max_tokens_per_micro_batch=80), lengths) for rank in range(4)]
    assert shared[0] == shared[1] != shared[2] == shared[3]


def test_what_several_ranks_know_of_a_sequence_counts_once() -> None:
    for rank, counted in ((0, 3.0), (1, 0.0), (2, 3.0), (3, 0.0)):
        engine = Summing(rank, 4, sequence_parallel=2)
        assert sum_over_sequences(engine, torch.tensor([3.0])).tolist() == [counted]


@dataclass(frozen=True)
class Summing(Place):
    """Shows what the rank adds to a sum."""

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def lengths_of(groups: Sequence[BatchGroup]) -> list[list[int]]:
    return [[sequence.num_tokens for sequence in group.sequences] for group in groups]


def part_of(groups: Sequence[TrainGroup], rows: frozenset[int]) -> list[BatchGroup]:
    """What a rank has of a batch that needs the tokens at ``rows``."""
    found, row = [], 0
    for group in groups:
        sequences: list[BatchSequence] = []
        for sequence in group.sequences:
            outline = AbsentSequence(sequence.num_tokens, sequence.num_action_tokens, sequence.oldest_version)
            sequences.append(sequence if row in rows else outline)
            row += 1
        fields = {name: value for name, value in vars(group).items() if name != "sequences"}
        found.append(BatchGroup(sequences=tuple(sequences), **fields))
    return found


def same(first: PackedBatch, second: PackedBatch) -> bool:
    tensors = [name for name, value in vars(first).items() if isinstance(value, torch.Tensor)]
    equal = all(torch.equal(vars(first)[name], vars(second)[name]) for name in tensors)
    return equal and first.sequence_indices == second.sequence_indices


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_a_rank_packs_the_same_from_its_own_sequences_as_from_all(world_size: int, num_mini_batches: int, seed: int) -> None:
    groups = random_groups(4, 3, seed=seed)
    settings, trained = settings_of(num_mini_batches), []
    for rank in range(world_size):
        place = Place(rank, world_size)
        rows = rows_of_rank(place, settings, lengths_of(groups))
        own, whole = (
            planned_mini_batches(place, held, AdvantageTable.of(held, AdvantageSettings()), VERSION, num_mini_batches)
            for held in (part_of(groups, rows), groups)
        )
        for step, expected in zip(own, whole, strict=True):
            assert replace(step, micro_batches=()) == replace(expected, micro_batches=())
            assert all(map(same, step.micro_batches, expected.micro_batches))
            indices = [index for packed in step.micro_batches for index in packed.sequence_indices]
            assert sum(packed.num_tokens for packed in step.micro_batches) == step.own_tokens
            trained += [step.first_row + index for index in indices]
        assert set(trained[-len(rows) :]) == rows if rows else True
    assert sorted(trained) == list(range(12))


def test_a_pass_over_the_whole_batch_adds_the_sequences_that_it_gives_to_the_rank() -> None:
    lengths = lengths_of(random_groups(4, 3, seed=1))
    place = Place(0, 2)
    flat = [length for group in lengths for length in group]
    unsplit = {row for indices in own_micro_batches(place, flat) for row in indices}
    steps = rows_of_rank(place, settings_of(2), lengths)
    assert not unsplit <= steps, "the test needs another split"
    assert rows_of_rank(place, settings_of(2, kl_coefficient=0.1, kl_in="reward"), lengths) == steps | unsplit


def test_a_sequence_of_another_rank_cannot_be_packed() -> None:
    groups = part_of(random_groups(1, 2, seed=1), frozenset({0}))
    credit = AdvantageTable.of(groups, AdvantageSettings())
    assert credit.with_advantages(0).num_tokens == groups[0].sequences[0].num_tokens
    with pytest.raises(ValueError, match="is trained by another rank: its tokens are not here"):
        credit.with_advantages(1)


def test_micro_batches_of_a_large_step_are_packed_when_they_are_used_and_not_kept() -> None:
    groups = random_groups(2, 3, seed=2)
    asked = []
    credit = AdvantageTable.of(groups, AdvantageSettings())
    at_once = planned_mini_batches(Place(0, 1), groups, credit, VERSION, 1)[0].micro_batches
    assert isinstance(at_once, list), "a small step is packed at once"

    def pack_own(members: Sequence[int]) -> PackedBatch:
        asked.append(list(members))
        return at_once[len(asked) % 2 - 1]

    later = PackedLater([[0], [1, 2]], pack_own)
    assert (len(later), asked) == (2, [])
    assert [next(iter(later[1:])) is at_once[0], asked] == [True, [[1, 2]]]
    assert len(list(later)) == 2
    assert asked == [[1, 2], [0], [1, 2]]
