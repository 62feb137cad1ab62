"""Plans which rank trains which sequences of a batch, and when it packs them: from lengths alone, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from gspo.model.packing import BatchGroup, PackedBatch, pack, plan_micro_batches
from gspo_services.learner.advantages import AdvantageTable
from gspo_services.shared.settings import Settings

KEPT_TOKENS: Final = 2**21
"""Micro-batches of up to this many tokens of a step are packed at once and kept: 128 MB. Larger ones are packed when they
are used, and forgotten."""


class RankBudget(Protocol):
    """The part of an engine that the plan depends on."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def max_tokens_per_micro_batch(self) -> int: ...
    @property
    def max_sequence_tokens(self) -> int | None: ...
    @property
    def sequence_parallel(self) -> int:
        """So many neighbouring ranks train the same sequences, each a slice of their tokens."""


class SummingRank(RankBudget, Protocol):
    """The part of an engine that counts over all ranks."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor: ...


def split_groups(num_groups: int, num_mini_batches: int) -> list[range]:
    """Consecutive groups of each mini-batch; sizes differ by at most one, the larger ones first.

    Raises: ValueError when there are fewer groups than mini-batches.
    """
    if not 1 <= num_mini_batches <= num_groups:
        raise ValueError(f"num_mini_batches is {num_mini_batches} for a batch of {num_groups} groups; each needs one group")
    size, larger = divmod(num_groups, num_mini_batches)
    starts = [index * size + min(index, larger) for index in range(num_mini_batches + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def own_micro_batches(engine: RankBudget, lengths: Sequence[int]) -> list[list[int]]:
    """This rank's micro-batches of sequences of these lengths, as indices.

    Raises: ValueError, on all ranks alike, for a sequence that is too long for the engine.
    """
    together = engine.sequence_parallel
    plan = plan_micro_batches(
        lengths,
        engine.max_tokens_per_micro_batch * together,
        engine.world_size // together,
        max_sequence_tokens=engine.max_sequence_tokens,
    )
    return plan[engine.rank // together]


def sum_over_sequences(engine: SummingRank, tensor: Tensor) -> Tensor:
    """Sum over all ranks the values of the sequences that each trains, counting each sequence once. Collective."""
    counts = engine.rank % engine.sequence_parallel == 0
    return engine.sum_over_ranks(tensor if counts else torch.zeros_like(tensor))


def rows_of_rank(engine: RankBudget, settings: Settings, lengths: Sequence[Sequence[int]]) -> frozenset[int]:
    """The sequences of a batch, by their places in it, of which this rank needs the tokens: those that it trains in one of
    the steps, and those that a pass over the whole batch before the first step gives to it.

    Args:
        lengths: tokens of each sequence, by group.

    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    first_rows = [0, *accumulate(map(len, lengths))]
    flat = [length for group in lengths for length in group]
    rows: list[int] = []
    for groups in split_groups(len(lengths), settings.batch.mini_batches):
        start, end = first_rows[groups.start], first_rows[groups.stop]
        rows += [start + row for row in _flat(own_micro_batches(engine, flat[start:end]))]
    if settings.objective.kl_coefficient > 0 and settings.objective.kl_in == "reward":
        rows += _flat(own_micro_batches(engine, flat))
    return frozenset(rows)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this rank's share of it, and the place of its rows in the batch's table of statistics."""

    micro_batches: Sequence[PackedBatch]
    num_sequences: int
    num_episodes: int
    """N of the loss, over all ranks."""
    num_action_tokens: int
    """Over all ranks; at least 1."""
    num_tokens: int
    """All tokens, over all ranks."""
    own_tokens: int
    """All tokens on this rank, and on those that train the same sequences."""
    first_row: int


def planned_mini_batches(
    engine: RankBudget,
    groups: Sequence[BatchGroup],
    credit: AdvantageTable,
    policy_version: int,
    num_mini_batches: int,
) -> list[MiniBatch]:
    """Plan a batch's steps: about equally many consecutive groups, spread over ranks and micro-batches by length.

    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    first_rows = np.concatenate([[0], np.cumsum([len(group.sequences) for group in groups])]).tolist()
    mini_batches = []
    for chosen in split_groups(len(groups), num_mini_batches):
        start, end = first_rows[chosen.start], first_rows[chosen.stop]
        lengths = [sequence.num_tokens for sequence in credit.sequences[start:end]]

        def pack_own(indices: Sequence[int], first: int = start) -> PackedBatch:
            members = [credit.with_advantages(first + index) for index in indices]
            return pack(members, policy_version=policy_version, sequence_indices=indices)

        own = own_micro_batches(engine, lengths)
        own_tokens = sum(lengths[index] for indices in own for index in indices)
        num_action_tokens = max(1, sum(sequence.num_action_tokens for sequence in credit.sequences[start:end]))
        num_episodes = sum(groups[index].num_episodes for index in chosen)
        micro_batches = _packed(own, own_tokens, pack_own)
        mini_batches.append(
            MiniBatch(micro_batches, end - start, num_episodes, num_action_tokens, sum(lengths), own_tokens, start)
        )
    return mini_batches


class PackedLater(Sequence[PackedBatch]):
    """Micro-batches that are packed each time they are used, so that only one of them takes memory."""

    def __init__(self, members: Sequence[Sequence[int]], pack: Callable[[Sequence[int]], PackedBatch]) -> None:
        self._members = members
        self._pack = pack

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> PackedBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedBatch]: ...
    def __getitem__(self, index: int | slice) -> PackedBatch | Sequence[PackedBatch]:
        if isinstance(index, slice):
            return PackedLater(self._members[index], self._pack)
        return self._pack(self._members[index])


def _packed(
    members: Sequence[Sequence[int]], num_tokens: int, pack: Callable[[Sequence[int]], PackedBatch]
) -> Sequence[PackedBatch]:
    """Return the micro-batches of these sequences, of ``num_tokens`` together: at once if they are small."""
    later = PackedLater(members, pack)
    return later if num_tokens > KEPT_TOKENS else list(later)


def _flat(members: Iterable[Sequence[int]]) -> list[int]:
    return [row for each in members for row in each]
