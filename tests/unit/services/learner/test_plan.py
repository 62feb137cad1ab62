"""Every rank plans alike from lengths, and needs the tokens of its own sequences only."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.model.packing import BatchGroup, BatchSequence, PackedBatch, TrainGroup
from gspo.settings import Objective
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable
from gspo_services.learner.broker.assembly import AbsentSequence
from gspo_services.learner.plan import (
    MINI_BATCH_ORDER,
    BatchRows,
    deal_groups,
    deal_in_turn,
    own_micro_batches,
    own_step,
)
from gspo_services.learner.planned_batch import BatchSettings, PackedLater, plan_batch, rows_of_rank
from gspo_services.learner.profiling import NO_PROFILE, Phases
from gspo_services.learner.sums import sum_over_sequences
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
    shares_beginnings: bool = False
    profile: Phases = NO_PROFILE


def settings_of(num_mini_batches: int, **objective: Any) -> Any:
    batch = {"mini_batches": num_mini_batches, "groups_per_batch": 12, "group_size": 4}
    return validated({"batch": batch, "objective": objective}, "test")


def test_ranks_that_share_sequences_have_the_same_ones_and_room_for_twice_as_many() -> None:
    lengths = [30, 25, 20, 20, 10, 5, 40, 38]
    apart = range(8)
    shared = [own_micro_batches(Place(rank, 4, sequence_parallel=2), lengths, apart) for rank in range(4)]
    wider = [Place(rank // 2, 2, max_tokens_per_micro_batch=80) for rank in range(4)]
    assert shared == [own_micro_batches(place, lengths, apart) for place in wider]
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


versions_of_groups = st.lists(st.integers(VERSION - 4, VERSION), min_size=1, max_size=24)


@given(versions_of_groups, st.integers(1, 24), st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_every_mini_batch_has_the_batchs_mix_of_versions_whatever_order_the_broker_sends(
    versions: list[int], num_mini_batches: int, seed: int, order: random.Random
) -> None:
    num_mini_batches = min(num_mini_batches, len(versions))
    sent = [(version, f"{index}") for index, version in enumerate(sorted(versions))]
    for version in ("all", *set(versions)):
        dealt = deal_in_turn(*zip(*sent, strict=True), num_mini_batches, seed=seed)
        counts = [sum(version in ("all", sent[index][0]) for index in chosen) for chosen in dealt]
        assert max(counts) - min(counts) <= 1, f"version {version}: {counts}"
        assert sorted(index for chosen in dealt for index in chosen) == list(range(len(versions)))
    ids = [[sent[index][1] for index in chosen] for chosen in dealt]
    order.shuffle(sent)
    dealt = deal_in_turn(*zip(*sent, strict=True), num_mini_batches, seed=seed)
    assert [[sent[index][1] for index in chosen] for chosen in dealt] == ids


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=24), st.integers(1, 8), st.integers(0, 99)
)
def test_groups_of_a_version_are_dealt_by_adapter_too(sent: list[tuple[int, int]], num_mini_batches: int, seed: int) -> None:
    num_mini_batches = min(num_mini_batches, len(sent))
    versions, adapters = zip(*sent, strict=True)
    dealt = deal_in_turn(
        versions, [f"{index}" for index in range(len(sent))], num_mini_batches, seed=seed, adapters=adapters
    )
    for kind in set(sent):
        counts = [sum(sent[index] == kind for index in chosen) for chosen in dealt]
        assert max(counts) - min(counts) <= 1, f"version {kind[0]} of adapter {kind[1]}: {counts}"


def test_over_many_batches_every_group_comes_first_equally_often() -> None:
    """Also those of the oldest version, whose odd group must go somewhere, and those of the lowest ids."""
    first = Counter[int]()
    for batch in range(2000):
        first.update(deal_in_turn([1, 1, 1, 2, 2, 3, 3], list("abcdefg"), 3, seed=batch)[0])
    assert all(count == pytest.approx(2000 / 3, rel=0.1) for count in first.values()), first


def test_the_deal_is_the_same_in_every_process_and_release() -> None:
    """Change ``MINI_BATCH_ORDER`` with what is dealt: replay compares it."""
    dealt = deal_in_turn([3, 3, 3, 4, 4, 5, 5, 5], list("abcdefgh"), 3, seed=7)
    assert (MINI_BATCH_ORDER, dealt) == (3, [[2, 7], [1, 4, 5], [0, 3, 6]])
    with pytest.raises(ValueError, match="num_mini_batches is 3 for a batch of 2 groups"):
        deal_in_turn([1, 1], ["a", "b"], 3, seed=0)


def test_a_group_is_as_old_as_its_oldest_token_and_one_without_actions_is_new() -> None:
    def group(name: str, *oldest: int | None) -> BatchGroup:
        return BatchGroup(
            group_id=name, sequences=tuple(AbsentSequence(5, 2, each) for each in oldest), rewards=np.zeros(len(oldest))
        )

    groups = [group("a", None), group("b", 9, 7), group("c", 9, 9), group("d", 7, None, 8)]
    assert deal_groups(groups, 9, 2) == deal_in_turn([9, 7, 9, 7], list("abcd"), 2, seed=9)
    assert BatchRows.of(groups).of_groups([3, 0]) == [5, 6, 7, 0]


def test_a_batch_with_fewer_groups_than_mini_batches_has_a_step_for_each_group() -> None:
    groups = [BatchGroup(group_id=name, sequences=(AbsentSequence(5, 2, 3),), rewards=np.zeros(1)) for name in "abc"]
    dealt = deal_groups(groups, 3, 8)
    assert sorted(dealt) == [[0], [1], [2]]
    assert dealt == deal_groups(groups, 3, 3)


@pytest.mark.parametrize("version", range(4))
def test_each_mini_batch_has_groups_of_each_adapter(version: int) -> None:
    groups = [
        BatchGroup(
            group_id=f"{place}", sequences=(AbsentSequence(5, 2, version),), rewards=np.zeros(1), adapter=int(place < 4)
        )
        for place in range(8)
    ]
    for chosen in deal_groups(groups, version, 4):
        assert [groups[index].adapter for index in chosen] == [0, 1] or [groups[index].adapter for index in chosen] == [1, 0]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.booleans())
def test_a_rank_packs_the_same_from_its_own_sequences_as_from_all(
    world_size: int, num_mini_batches: int, seed: int, shares: bool
) -> None:
    groups = [random_groups(4, 3, seed=seed, versions=(VERSION - age, VERSION))[age] for age in range(4)]
    # Some have no signal, and their sequences micro-batches of their own.
    groups = [replace(each, rewards=np.ones(3)) if (seed >> at) % 2 else each for at, each in enumerate(groups)]
    settings, trained, plans = settings_of(num_mini_batches), [], []
    for rank in range(world_size):
        place = Place(rank, world_size, shares_beginnings=shares)
        rows = rows_of_rank(place, settings, part_of(groups, frozenset()), VERSION)
        chosen = BatchSettings(mini_batches=num_mini_batches)
        own, whole = (
            plan_batch(cast(Any, place), held, VERSION, Objective(), chosen).mini_batches
            for held in (part_of(groups, rows), groups)
        )
        plans.append([step.plan.rows for step in own])
        for step, expected in zip(own, whole, strict=True):
            assert step.plan == expected.plan
            assert all(map(same, step.micro_batches, expected.micro_batches))
            assert [list(packed.sequence_indices) for packed in step.micro_batches] == step.plan.own
            assert sum(packed.num_tokens for packed in step.micro_batches) == step.plan.own_tokens
            trained += [row for members in step.plan.own for row in members]
        assert set(trained[-len(rows) :]) == rows if rows else True
    assert sorted(trained) == list(range(12))
    assert plans == [plans[0]] * world_size


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 2))
def test_sequences_without_a_gradient_come_first_and_alone(
    drawn: list[tuple[int, bool]], groups_of_ranks: int, together: int
) -> None:
    lengths, still = [length for length, _ in drawn], [each for _, each in drawn]
    world_size = groups_of_ranks * together
    plans = [
        own_step(Place(rank, world_size, sequence_parallel=together), lengths, still, range(len(drawn)))
        for rank in range(0, world_size, together)
    ]
    ((num_still, num_micro_batches),) = {(found, len(own)) for own, found in plans}
    assert num_still < num_micro_batches
    assert sorted(index for own, _ in plans for members in own for index in members) == list(range(len(drawn)))
    first = [index for own, _ in plans for members in own[:num_still] for index in members]
    share = sum(length for length, each in drawn if each) / sum(lengths)
    assert sorted(first) == ([at for at, each in enumerate(still) if each] if share >= 0.1 and not all(still) else [])


def test_sequences_of_one_group_stay_together_where_beginnings_are_shared() -> None:
    families = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    alone = Place(0, 1, shares_beginnings=True)
    assert own_micro_batches(alone, [10] * 10, families) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert own_micro_batches(alone, [10, 10, 10, 10, 50, 10, 10, 10, 20, 20], families) == [
        [4],
        [0, 1, 2, 3],
        [8, 9],
        [5, 6, 7],
    ]
    assert own_micro_batches(alone, [15] * 4, [0] * 4) == [[0, 1], [2, 3]]
    own, num_still = own_step(alone, [10] * 10, [False, True] * 5, families)
    assert (own, num_still) == ([[1, 3, 9], [5, 7], [0, 2, 8], [4, 6]], 2)


def test_a_group_that_is_a_large_part_of_a_step_is_split_so_that_every_rank_has_its_share() -> None:
    families = [0, 0, 0, 0, 1, 1, 1, 1]
    places = [Place(rank, 4, shares_beginnings=True, max_tokens_per_micro_batch=100) for rank in range(4)]
    assert [own_micro_batches(place, [10] * 8, families) for place in places] == [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]
    two = [Place(rank, 2, shares_beginnings=True, max_tokens_per_micro_batch=100) for rank in range(2)]
    assert [own_micro_batches(place, [10] * 8, families) for place in two] == [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]


def test_a_pass_over_the_whole_batch_adds_the_sequences_that_it_gives_to_the_rank() -> None:
    groups = random_groups(4, 3, seed=1)
    place = Place(0, 2)
    lengths = [sequence.num_tokens for group in groups for sequence in group.sequences]
    unsplit = {row for indices in own_micro_batches(place, lengths, np.repeat(range(4), 3).tolist()) for row in indices}
    steps = rows_of_rank(place, settings_of(2), groups, VERSION)
    assert not unsplit <= steps, "the test needs another split"
    assert rows_of_rank(place, settings_of(2, kl_coefficient=0.1, kl_in="reward"), groups, VERSION) == steps | unsplit


def test_a_sequence_of_another_rank_cannot_be_packed() -> None:
    groups = part_of(random_groups(1, 2, seed=1), frozenset({0}))
    credit = AdvantageTable.of(BatchRows.of(groups), AdvantageSettings())
    assert credit.with_advantages(0).num_tokens == groups[0].sequences[0].num_tokens
    with pytest.raises(ValueError, match="is trained by another rank: its tokens are not here"):
        credit.with_advantages(1)


def test_micro_batches_of_a_large_step_are_packed_when_they_are_used_and_not_kept() -> None:
    groups = random_groups(2, 3, seed=2)
    asked = []
    at_once = plan_batch(cast(Any, Place(0, 1)), groups, VERSION, Objective(), BatchSettings()).mini_batches[0].micro_batches
    assert isinstance(at_once, list), "a small step is packed at once"

    def pack_own(members: Sequence[int]) -> PackedBatch:
        asked.append(list(members))
        return at_once[len(asked) % 2 - 1]

    later = PackedLater([[0], [1, 2]], pack_own)
    assert (len(later), asked) == (2, [])
    assert [next(iter(later[1:])) is at_once[0], asked] == [True, [[1, 2]]]
    assert len(list(later)) == 2
    assert asked == [[1, 2], [0], [1, 2]]
