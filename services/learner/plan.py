"""Plans which step and which rank trains which sequences of a batch: from versions, ids and lengths, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gspo.model.micro_batches import plan_micro_batches
from gspo.model.packing import BatchGroup, BatchSequence

MINI_BATCH_ORDER: Final = 3
"""The number of the rule by which groups are dealt to mini-batches and micro-batches, in each batch's metrics. Raise it with
any change of what ``deal_in_turn`` or ``own_step`` returns: batches of another rule do not give the same weights when they
are trained again."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRows:
    """The M sequences of a batch as rows, those of its groups in order: what every rank knows of them."""

    groups: Sequence[BatchGroup]
    sequences: Sequence[BatchSequence]
    """[M]"""
    lengths: Sequence[int]
    """[M]; all tokens of each."""
    num_action_tokens: Sequence[int]
    """[M]"""
    group_ids: NDArray[np.int64]
    """[M]; the place of each one's group in ``groups``."""
    episode_ids: NDArray[np.int64]
    """[M]; each one's episode, counted from 0 over all groups."""
    rewards: NDArray[np.float64]
    """One of each episode."""

    @classmethod
    def of(cls, groups: Sequence[BatchGroup]) -> BatchRows:
        """Lay out the groups of a batch."""
        sequences = [sequence for group in groups for sequence in group.sequences]
        per_episode = [
            count
            for group in groups
            for count in ([1] * len(group.sequences) if group.sequences_per_episode is None else group.sequences_per_episode)
        ]
        return cls(
            groups=groups,
            sequences=sequences,
            lengths=[sequence.num_tokens for sequence in sequences],
            num_action_tokens=[sequence.num_action_tokens for sequence in sequences],
            group_ids=np.repeat(np.arange(len(groups)), [len(group.sequences) for group in groups]),
            episode_ids=np.repeat(np.arange(len(per_episode)), per_episode),
            rewards=np.concatenate([group.rewards for group in groups]),
        )

    def of_groups(self, chosen: Iterable[int]) -> list[int]:
        """Return the rows of the groups at ``chosen``, in that order."""
        starts = [0, *accumulate(len(group.sequences) for group in self.groups)]
        return [row for index in chosen for row in range(starts[index], starts[index + 1])]

    def families(self, chosen: Sequence[int]) -> list[int]:
        """Return the groups of the rows at ``chosen``, for ``pack``."""
        return [int(self.group_ids[row]) for row in chosen]


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, in rows of the batch. All but ``own`` and ``own_tokens`` is alike on every rank."""

    rows: Sequence[int]
    """Over all ranks."""
    own: Sequence[Sequence[int]]
    """Those of each of this rank's micro-batches."""
    num_still: int
    """So many of these, the first, have no gradient."""
    still_lengths: Sequence[int]
    """Of the sequences without a gradient that have such micro-batches, over all ranks."""
    num_episodes: int
    """N of the loss, over all ranks."""
    num_action_tokens: int
    """Over all ranks; at least 1."""
    num_tokens: int
    """All tokens, over all ranks."""
    own_tokens: int
    """All tokens on this rank, and on those that train the same sequences."""


def planned_steps(
    engine: RankBudget, rows: BatchRows, still_M: NDArray[np.bool_], policy_version: int, num_mini_batches: int
) -> list[StepPlan]:
    """Plan a batch's steps: the groups of ``deal_groups``, spread over ranks and micro-batches by length.

    ``still_M``: the sequences that have no gradient.

    Raises: ValueError, on all ranks alike, when the batch cannot be planned.
    """
    steps = []
    for chosen in deal_groups(rows.groups, policy_version, num_mini_batches):
        of_step = rows.of_groups(chosen)
        lengths, still = [rows.lengths[row] for row in of_step], still_M[of_step].tolist()
        own, num_still = own_step(engine, lengths, still, rows.group_ids[of_step].tolist())
        steps.append(
            StepPlan(
                rows=of_step,
                own=[[of_step[index] for index in members] for members in own],
                num_still=num_still,
                still_lengths=[length for length, each in zip(lengths, still, strict=True) if each] if num_still else [],
                num_episodes=sum(rows.groups[index].num_episodes for index in chosen),
                num_action_tokens=max(1, sum(rows.num_action_tokens[row] for row in of_step)),
                num_tokens=sum(lengths),
                own_tokens=sum(lengths[index] for members in own for index in members),
            )
        )
    return steps


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

    ``policy_version`` is that of the batch, and draws. A group without action tokens counts as one of that version. In a
    batch of fewer groups than mini-batches each group is one.
    """
    oldest = [
        min((each.oldest_version for each in group.sequences if each.oldest_version is not None), default=policy_version)
        for group in groups
    ]
    adapters = [group.adapter for group in groups]
    ids = [group.group_id for group in groups]
    return deal_in_turn(oldest, ids, min(num_mini_batches, len(groups)), seed=policy_version, adapters=adapters)


def own_micro_batches(engine: RankBudget, lengths: Sequence[int], families: Sequence[int]) -> list[list[int]]:
    """This rank's micro-batches of sequences of these lengths, as indices.

    ``families``: the group of each. Where beginnings are shared, neighbours of one group stay together, as far as they fit
    into a micro-batch and leave enough parts for all ranks.

    Raises: ValueError, on all ranks alike, for a sequence that is too long for the engine.
    """
    together = engine.sequence_parallel
    plan = plan_micro_batches(
        lengths,
        engine.max_tokens_per_micro_batch * together,
        engine.world_size // together,
        max_sequence_tokens=engine.max_sequence_tokens,
        families=families if engine.shares_beginnings else None,
    )
    return plan[engine.rank // together]


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
        parts = [list(range(len(lengths)))]
    own = [
        [
            [part[place] for place in members]
            for members in own_micro_batches(engine, [lengths[index] for index in part], [families[index] for index in part])
        ]
        for part in parts
    ]
    return [members for each in own for members in each], len(own[0]) if len(own) > 1 else 0
