"""Plans which mini-batch and which rank train which sequences of a batch, and when they are packed: from versions, ids and
lengths alone, alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from gspo.model.packing import BatchGroup, PackedBatch, pack, plan_micro_batches, require_lengths
from gspo_services.learner.advantages import AdvantageSettings, AdvantageTable, pulls_without_advantage
from gspo_services.shared.settings import Settings

MINI_BATCH_ORDER: Final = 3
"""The number of the rule by which groups are dealt to mini-batches and micro-batches, in each batch's metrics. Raise it with
any change of what ``deal_in_turn`` or ``own_step`` returns: batches of another rule do not give the same weights when they
are trained again."""

KEPT_TOKENS: Final = 2**21
"""Micro-batches of up to this many tokens of a step are packed at once and kept: 128 MB. Larger ones are packed when they
are used, and forgotten."""


PARTS_PER_RANK: Final = 2
"""Sequences of one group are trained by several ranks where they have more than such a part of a step's tokens."""
LEAST_STILL_SHARE: Final = 0.1
"""Of a step's tokens, in sequences without a gradient: below, micro-batches of their own cost more than they save."""


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

    @property
    def shares_beginnings(self) -> bool:
        """Sequences of one group in one micro-batch cost less than in several."""


class SummingRank(RankBudget, Protocol):
    """The part of an engine that counts over all ranks."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor: ...


def deal_in_turn(
    oldest_versions: Sequence[int],
    group_ids: Sequence[str],
    num_mini_batches: int,
    *,
    seed: int,
    adapters: Sequence[int] | None = None,
) -> list[list[int]]:
    """Deal a batch's groups to its mini-batches, as indices, so that each mini-batch has the batch's mix of versions.

    The broker sends the oldest groups first. Trained in that order, the first mini-batch would hold the oldest ones, and it
    is all that calibration and sigma see; the freshest would come last, after several steps, and be clipped most. So the
    groups are sorted by version, and dealt in turn like cards: of each version, and in all, two mini-batches have equally
    many, or one more. A plain shuffle would have the mix on average only, and a mini-batch has few groups.

    Groups of one version are in an order that ``seed`` and their ids draw, because old ids may mean long or hard tasks. So
    is the mini-batch that gets the first card; otherwise the first one would get all the odd old groups. Digests draw: they
    are equal on every rank, machine and release of Python, and do not depend on the order that the broker sends.

    Args:
        group_ids: all different.
        seed: another one for each batch.
        adapters: of each group, of several that are trained at once: those of a version are dealt out alike.

    Raises: ValueError when there are fewer groups than mini-batches.
    """
    num_groups = len(oldest_versions)
    if not 1 <= num_mini_batches <= num_groups:
        raise ValueError(f"num_mini_batches is {num_mini_batches} for a batch of {num_groups} groups; each needs one group")
    of_adapter = adapters or [0] * num_groups
    dealt = sorted(
        range(num_groups),
        key=lambda index: (oldest_versions[index], of_adapter[index], _draw(f"{seed} {group_ids[index]}")),
    )
    first = int.from_bytes(_draw(str(seed)), "big") % num_mini_batches
    return [dealt[(number - first) % num_mini_batches :: num_mini_batches] for number in range(num_mini_batches)]


def _draw(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def deal_groups(groups: Sequence[BatchGroup], policy_version: int, num_mini_batches: int) -> list[list[int]]:
    """Return the groups of each mini-batch, as indices, by ``deal_in_turn`` and the oldest version of any of their tokens.

    ``policy_version`` is that of the batch, and draws. A group without action tokens counts as one of that version. A batch
    without the share that a broker quarantined may have fewer groups than mini-batches: then each group is one.
    """
    oldest = [
        min((each.oldest_version for each in group.sequences if each.oldest_version is not None), default=policy_version)
        for group in groups
    ]
    adapters = [group.adapter for group in groups]
    ids = [group.group_id for group in groups]
    return deal_in_turn(oldest, ids, min(num_mini_batches, len(groups)), seed=policy_version, adapters=adapters)


def rows_of_groups(groups: Sequence[BatchGroup], chosen: Iterable[int]) -> list[int]:
    """Return the places in the batch of the sequences of the groups at ``chosen``, in that order."""
    starts = [0, *accumulate(len(group.sequences) for group in groups)]
    return [row for index in chosen for row in range(starts[index], starts[index + 1])]


def group_of_rows(groups: Sequence[BatchGroup]) -> list[int]:
    """Return the group of each sequence of a batch, as an index."""
    return [index for index, group in enumerate(groups) for _ in group.sequences]


def shared_by(engine: RankBudget, families: Sequence[int]) -> Sequence[int] | None:
    """Return the groups of a micro-batch's sequences for ``pack``; None where beginnings are not shared."""
    return families if engine.shares_beginnings else None


def own_micro_batches(engine: RankBudget, lengths: Sequence[int], families: Sequence[int]) -> list[list[int]]:
    """This rank's micro-batches of sequences of these lengths, as indices.

    ``families``: the group of each. Where beginnings are shared, neighbours of one group stay together, as far as they fit
    into a micro-batch and leave enough parts for all ranks.

    Raises: ValueError, on all ranks alike, for a sequence that is too long for the engine.
    """
    together = engine.sequence_parallel
    max_tokens, num_ranks = engine.max_tokens_per_micro_batch * together, engine.world_size // together
    require_lengths(lengths, engine.max_sequence_tokens)
    largest = min(max_tokens, sum(lengths) // (PARTS_PER_RANK * num_ranks) if num_ranks > 1 else max_tokens)
    units = _units(lengths, families, largest) if engine.shares_beginnings else [[index] for index in range(len(lengths))]
    plan = plan_micro_batches([sum(lengths[index] for index in unit) for unit in units], max_tokens, num_ranks)
    return [_flat(units[place] for place in members) for members in plan[engine.rank // together]]


def _units(lengths: Sequence[int], families: Sequence[int], largest: int) -> list[list[int]]:
    """Neighbours of one family, of at most ``largest`` tokens together; a longer sequence is alone."""
    units: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if units and families[units[-1][0]] == families[index] and length <= room:
            units[-1].append(index)
        else:
            units.append([index])
            room = largest
        room -= length
    return units


def own_step(
    engine: RankBudget, lengths: Sequence[int], still: Sequence[bool], families: Sequence[int]
) -> tuple[list[list[int]], int]:
    """This rank's micro-batches of one step, as indices, and how many of them need no backward pass: the first ones, which
    hold the sequences that are ``still``. Both numbers are alike on every rank.

    A group whose rewards are all equal has no gradient. Backward takes two thirds of a step's time, or more.

    Raises: ValueError, on all ranks alike, for a sequence that is too long for the engine.
    """
    parts = [[index for index, each in enumerate(still) if each is kind] for kind in (True, False)]
    if not parts[1] or sum(lengths[index] for index in parts[0]) < LEAST_STILL_SHARE * sum(lengths):
        return own_micro_batches(engine, lengths, families), 0
    without, live = (
        [
            [part[place] for place in members]
            for members in own_micro_batches(engine, [lengths[index] for index in part], [families[index] for index in part])
        ]
        for part in parts
    )
    return [*without, *live], len(without)


def sum_over_sequences(engine: SummingRank, tensor: Tensor) -> Tensor:
    """Sum over all ranks the values of the sequences that each trains, counting each sequence once. Collective."""
    counts = engine.rank % engine.sequence_parallel == 0
    return engine.sum_over_ranks(tensor if counts else torch.zeros_like(tensor))


def gathered_over_sequences(engine: SummingRank, num_rows: int, rows: Tensor, own: Tensor) -> Tensor:
    """Return the table of all sequences of a batch, on the host, with one wait for the device. Collective.

    Args:
        num_rows: the sequences of the batch.
        rows: int64 [n], on the host: those that this rank knows; ``own``: [n, C], their values.
    """
    # The ranks that trained a sequence fill its row, and one of them counts; the others leave it 0. A sum then gathers all.
    table = own.new_zeros(num_rows, own.shape[1])
    table[rows.to(own.device, non_blocking=True)] = own
    return sum_over_sequences(engine, table).cpu()


def rows_of_rank(
    engine: RankBudget, settings: Settings, groups: Sequence[BatchGroup], policy_version: int
) -> frozenset[int]:
    """The sequences of a batch, by their places in it, of which this rank needs the tokens: those that it trains in one of
    the steps, and those that a pass over the whole batch before the first step gives to it.

    ``groups`` and ``policy_version``: those of the batch; of the groups, lengths and rewards are read, and no tokens.
    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    lengths = [sequence.num_tokens for group in groups for sequence in group.sequences]
    advantages = AdvantageSettings.of(settings)
    balances_load = settings.objective.load_balance_coefficient > 0
    pulls = pulls_without_advantage(settings.objective, advantages, balances_load=balances_load)
    still = [False] * len(lengths) if pulls else AdvantageTable.of(groups, advantages).still.tolist()
    found: set[int] = set()
    families = group_of_rows(groups)
    for chosen in deal_groups(groups, policy_version, settings.batch.mini_batches):
        rows = rows_of_groups(groups, chosen)
        of_step = [lengths[row] for row in rows], [still[row] for row in rows], [families[row] for row in rows]
        own, _ = own_step(engine, *of_step)
        found.update(rows[index] for index in _flat(own))
    if settings.objective.kl_coefficient > 0 and settings.objective.kl_in == "reward":
        found.update(_flat(own_micro_batches(engine, lengths, families)))
    return frozenset(found)


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: this rank's share of it, and the place of its rows in the batch's table of statistics."""

    micro_batches: Sequence[PackedBatch]
    num_still: int
    """So many of them, the first, have no gradient: alike on every rank."""
    still_lengths: Sequence[int]
    """Of the sequences in those, over all ranks."""
    rows: Sequence[int]
    """The places of its sequences in the batch, over all ranks."""
    num_episodes: int
    """N of the loss, over all ranks."""
    num_action_tokens: int
    """Over all ranks; at least 1."""
    num_tokens: int
    """All tokens, over all ranks."""
    own_tokens: int
    """All tokens on this rank, and on those that train the same sequences."""


def planned_mini_batches(
    engine: RankBudget,
    groups: Sequence[BatchGroup],
    credit: AdvantageTable,
    policy_version: int,
    num_mini_batches: int,
    *,
    pulls_without_advantage: bool = False,
) -> list[MiniBatch]:
    """Plan a batch's steps: the groups of ``deal_groups``, spread over ranks and micro-batches by length.

    ``pulls_without_advantage``: every sequence has a gradient.

    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    mini_batches = []
    still = np.zeros(len(credit.sequences), dtype=np.bool_) if pulls_without_advantage else credit.still
    families = group_of_rows(groups)
    for chosen in deal_groups(groups, policy_version, num_mini_batches):
        rows = rows_of_groups(groups, chosen)
        members = [credit.sequences[row] for row in rows]
        lengths = [sequence.num_tokens for sequence in members]

        def pack_own(indices: Sequence[int], rows: Sequence[int] = rows) -> PackedBatch:
            own = [credit.with_advantages(rows[index]) for index in indices]
            shared = shared_by(engine, [families[rows[index]] for index in indices])
            return pack(own, policy_version=policy_version, sequence_indices=indices, families=shared)

        without = still[rows].tolist()
        own, num_still = own_step(engine, lengths, without, [families[row] for row in rows])
        still_lengths = [length for length, each in zip(lengths, without, strict=True) if each] if num_still else []
        own_tokens = sum(lengths[index] for indices in own for index in indices)
        num_action_tokens = max(1, sum(sequence.num_action_tokens for sequence in members))
        num_episodes = sum(groups[index].num_episodes for index in chosen)
        micro_batches = _packed(own, own_tokens, pack_own)
        mini_batches.append(
            MiniBatch(
                micro_batches, num_still, still_lengths, rows, num_episodes, num_action_tokens, sum(lengths), own_tokens
            )
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
