"""Assembles a batch on one rank: the lengths of all sequences, and the tokens of those that this rank trains.

Tokens keep their wire format, 8 bytes a token, and become the trainer's arrays when they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gspo.model.packing import BatchGroup, BatchSequence, TrainSequence
from gspo_protocol.codec import Array
from gspo_protocol.messages import Batch, BatchItem, BatchPart, EndOfRun, SkipBatch
from gspo_protocol.messages.experts import decode_experts, joined_experts, sampled_between
from gspo_protocol.messages.pieces import ACTION, OBSERVATION
from gspo_services.learner.broker.port import Answer, BatchAnnounced, PartArrived

OBSERVATION_TURN: Final = -1


@dataclass(frozen=True, kw_only=True)
class AssembledBatch:
    """A batch that can be trained on this rank."""

    batch: Batch
    groups: Sequence[BatchGroup]


class OwnSequence:
    """A sequence that this rank trains."""

    def __init__(
        self,
        token_ids: Array,
        logprobs: Array,
        segments: Array,
        version_runs: Array,
        temperature: float,
        oldest: int | None,
        adapter: int,
        experts: Array | None = None,
    ) -> None:
        """The arrays are those of ``gspo_protocol.messages.BatchPart``, of this sequence; ``experts`` of its actions."""
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._segments = segments
        self._version_runs = version_runs
        self._temperature = temperature
        self._adapter = adapter
        self._experts = experts
        self.oldest_version = oldest
        self.num_tokens = len(token_ids)
        self.num_action_tokens = int(segments[segments[:, 0] == ACTION, 3].sum())

    def loaded(self) -> TrainSequence:
        """Return the trainer's arrays, made now. Raises: ValueError when they cannot be trained on."""
        kinds, turns, _, lengths = self._segments.T
        is_action = np.repeat(kinds == ACTION, lengths)
        turn_ids = np.repeat(turns, lengths)
        versions = np.repeat(self._version_runs[:, 0], self._version_runs[:, 1])
        return TrainSequence(
            token_ids=self._token_ids.astype(np.int64),
            action_mask=is_action,
            # The engine's rounding can put a certain token's log-prob just above 0: valid in a message, not in training.
            behaviour_logprobs=np.where(is_action, np.minimum(self._logprobs, 0.0), 0.0).astype(np.float32),
            versions=np.where(is_action, versions, -1).astype(np.int64),
            turn_ids=np.where(is_action, turn_ids, OBSERVATION_TURN).astype(np.int32),
            temperature=self._temperature,
            adapter=self._adapter,
            experts=None if self._experts is None else decode_experts(self._experts),
        )


@dataclass(frozen=True)
class AbsentSequence:
    """A sequence that another rank trains."""

    num_tokens: int
    num_action_tokens: int
    oldest_version: int | None

    def loaded(self) -> TrainSequence:
        """Raise ValueError: its tokens are not here."""
        raise ValueError(f"a sequence of {self.num_tokens} tokens is trained by another rank: its tokens are not here")


class _Trajectory:
    """The tokens of one trajectory, as they arrive."""

    def __init__(self, num_tokens: int) -> None:
        self.token_ids = np.empty(num_tokens, np.int32)
        self.logprobs = np.empty(num_tokens, np.float32)
        self.segments: list[Array] = []
        self.version_runs: list[Array] = []
        self._pieces: list[tuple[Array | None, Array, int, int]] = []
        """Of each part: the experts, the segments, and the range of tokens that is taken of both."""
        self.num_tokens = 0

    def add(self, arrays: Mapping[str, Array], begin: int, end: int) -> None:
        """Append the tokens [begin, end) of a part."""
        into = slice(self.num_tokens, self.num_tokens + end - begin)
        self.token_ids[into] = arrays["token_ids"][begin:end]
        self.logprobs[into] = arrays["logprobs"][begin:end]
        self.segments.append(_rows_between(arrays["segments"], begin, end))
        self.version_runs.append(_rows_between(arrays["version_runs"], begin, end))
        self._pieces.append((arrays.get("experts"), arrays["segments"], begin, end))
        self.num_tokens += end - begin

    def sequences(self, temperature: float, oldest: int | None, adapter: int) -> list[OwnSequence]:
        """Split the trajectory into sequences, whose tokens may alternate. One without action tokens trains nothing."""
        segments, runs = np.concatenate(self.segments), np.concatenate(self.version_runs)
        kinds, _, ids, lengths = segments.T
        experts = self._experts_by_sequence(kinds, ids, lengths)
        if not ids.any():
            return [OwnSequence(self.token_ids, self.logprobs, segments, runs, temperature, oldest, adapter, experts.get(0))]
        versions, ids_of_tokens = np.repeat(runs[:, 0], runs[:, 1]), np.repeat(ids, lengths)
        found = []
        for sequence in np.unique(ids[kinds == ACTION]):
            chosen = ids_of_tokens == sequence
            arrays = self.token_ids[chosen], self.logprobs[chosen], segments[ids == sequence], _runs_of(versions[chosen])
            found.append(OwnSequence(*arrays, temperature, oldest, adapter, experts.get(int(sequence))))
        return found

    def _experts_by_sequence(self, kinds: Array, ids: Array, lengths: Array) -> dict[int, Array]:
        """Return the experts of each sequence's action tokens; empty where none are known."""
        if all(experts is None for experts, *_ in self._pieces):
            return {}
        rows = []
        for experts, segments, begin, end in self._pieces:
            first, last = sampled_between(segments, begin, end)
            rows.append((None if experts is None else experts[first:last], last - first))
        joined = joined_experts(rows)
        assert joined is not None
        sampled = kinds != OBSERVATION
        is_action, sequences = (np.repeat(each[sampled], lengths[sampled]) for each in (kinds == ACTION, ids))
        return {sequence: joined[is_action & (sequences == sequence)] for sequence in np.unique(sequences).tolist()}


class Assembly:
    """Takes the parts of one batch in order, and keeps this rank's tokens."""

    def __init__(
        self,
        batch: Batch,
        arrays: Mapping[str, Array],
        rows_of: Callable[[Sequence[BatchGroup], int], frozenset[int]],
        adapters: Sequence[str] = (),
    ) -> None:
        """``rows_of`` says, from the batch's groups and its policy version, which of the sequences this rank trains.
        ``adapters``: the names of those that are trained, if there are several.

        Raises: ValueError when a group cannot be trained, for a sequence that is longer than its group was allowed, and for
            an adapter that is not trained; what ``rows_of`` raises.
        """
        self._batch = batch
        self._adapters = [_adapter_of(item, adapters) for item in batch.items]
        self._num_tokens = batch.num_tokens
        self._ends = list(accumulate(item.num_tokens for item in batch.items))
        self._next_part = 0
        self._open: dict[int, _Trajectory] = {}
        by_group: dict[int, list[int]] = {}
        for place, item in enumerate(batch.items):
            by_group.setdefault(item.group_id, []).append(place)
        self._members = by_group
        split = list(batch.split(arrays))
        for item, _, outline in split:
            _require_length(item, outline)
        self._rewards = [rewards.astype(np.float64) for _, rewards, _ in split]
        self._roles = batch.of_turns("turn_roles", arrays)
        self._discarded = batch.of_turns("turn_discarded", arrays)
        self._sequences: list[list[BatchSequence]] = [_absent(item, outline) for item, _, outline in split]
        # A group that cannot be trained is refused here, before its tokens come.
        own = rows_of(self._groups(), batch.policy_version)
        self._own: dict[int, list[int]] = {}
        """By the item's place: which of its sequences this rank trains."""
        row = 0
        for place in (place for places in by_group.values() for place in places):
            number = len(self._sequences[place])
            mine = [each for each in range(number) if row + each in own]
            row += number
            if mine:
                self._own[place] = mine

    @property
    def complete(self) -> bool:
        return self._next_part == self._batch.num_parts

    def add(self, part: BatchPart, arrays: Mapping[str, Array]) -> None:
        """Take the next part.

        Raises: ValueError when it is a different part, or a trajectory differs from its announcement.
        """
        begin = self._next_part * self._batch.part_tokens
        expected = self._batch.tokens_of(self._next_part)
        num_tokens = len(arrays["token_ids"])
        if (part.index, part.part, num_tokens) != (self._batch.index, self._next_part, expected):
            raise ValueError(
                f"part {part.part} of batch {part.index} with {num_tokens} tokens, next is part {self._next_part} of batch "
                f"{self._batch.index} with {expected}"
            )
        self._next_part += 1
        end = begin + num_tokens
        for place in range(np.searchsorted(self._ends, begin, "right"), np.searchsorted(self._ends, end, "left") + 1):
            if place not in self._own:
                continue
            item = self._batch.items[place]
            start = self._ends[place] - item.num_tokens
            trajectory = self._open.setdefault(place, _Trajectory(item.num_tokens))
            trajectory.add(arrays, max(start, begin) - begin, min(self._ends[place], end) - begin)
            if trajectory.num_tokens == item.num_tokens:
                self._take(place, self._open.pop(place))

    def assembled(self) -> AssembledBatch:
        """Return the batch. Raises: ValueError while parts are missing."""
        if not self.complete:
            raise ValueError(f"batch {self._batch.index} lacks its parts from {self._next_part} on")
        return AssembledBatch(batch=self._batch, groups=self._groups())

    def _take(self, place: int, trajectory: _Trajectory) -> None:
        announced = self._sequences[place]
        oldest = announced[0].oldest_version if announced else None
        found = trajectory.sequences(self._batch.items[place].temperature, oldest, self._adapters[place])
        sizes = [[(each.num_tokens, each.num_action_tokens) for each in sequences] for sequences in (announced, found)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"trajectory {self._batch.items[place].trajectory_id}: its sequences have {sizes[1]} tokens and action "
                f"tokens, announced were {sizes[0]}"
            )
        for each in self._own[place]:
            announced[each] = found[each]

    def _groups(self) -> list[BatchGroup]:
        return [
            BatchGroup(
                group_id=str(group_id),
                sequences=tuple(sequence for place in places for sequence in self._sequences[place]),
                rewards=np.asarray([sum(self._rewards[place].tolist()) for place in places], dtype=np.float64),
                turn_rewards=tuple(self._rewards[place] for place in places),
                turn_roles=None if self._roles is None else tuple(self._roles[place].astype(np.int64) for place in places),
                turn_discarded=None if self._discarded is None else tuple(self._discarded[place] == 1 for place in places),
                sequences_per_episode=tuple(len(self._sequences[place]) for place in places),
                max_tokens=self._batch.items[places[-1]].max_tokens,
                adapter=self._adapters[places[-1]],
            )
            for group_id, places in self._members.items()
        ]


def assemble(
    announced: BatchAnnounced,
    rows_of: Callable[[Sequence[BatchGroup], int], frozenset[int]],
    next_arrival: Callable[[], Answer | None],
    watched: Callable[[int], AbstractContextManager[None]],
    adapters: Sequence[str] = (),
) -> AssembledBatch | SkipBatch | EndOfRun | None:
    """Take a batch's parts as they reach this rank. Collective where ``next_arrival`` is.

    Args:
        rows_of: see ``Assembly``.
        next_arrival: what rank 0 received next, on every rank; None: stop.
        watched: a context in which errors count against the batch.
        adapters: see ``Assembly``.

    Returns: the batch; or what came in its place; None: stop.
    """
    index = announced.batch.index
    with watched(index):
        assembly = Assembly(announced.batch, announced.arrays, rows_of, adapters)
    while not assembly.complete:
        arrived = next_arrival()
        if not isinstance(arrived, PartArrived):
            assert not isinstance(arrived, BatchAnnounced), arrived.batch.index
            return arrived
        with watched(index):
            assembly.add(arrived.part, arrived.arrays)
    with watched(index):
        return assembly.assembled()


def _adapter_of(item: BatchItem, adapters: Sequence[str]) -> int:
    if item.adapter in adapters:
        return adapters.index(item.adapter)
    if not item.adapter and not adapters:
        return 0
    raise ValueError(
        f"trajectory {item.trajectory_id} was sampled with adapter {item.adapter!r}, and lora.adapters are "
        f"{', '.join(adapters) or 'none'}: give broker and learner the same settings"
    )


def _absent(item: BatchItem, outline: NDArray[Any]) -> list[BatchSequence]:
    return [
        AbsentSequence(tokens, actions, item.oldest_version if actions else None) for tokens, actions in outline.tolist()
    ]


def _require_length(item: BatchItem, outline: NDArray[Any]) -> None:
    longest = max(outline[:, 0].tolist(), default=0)
    if longest > item.max_tokens:
        raise ValueError(
            f"trajectory {item.trajectory_id}: a sequence has {longest} tokens, {item.max_tokens} allowed "
            "(sampling.max_tokens when its group began): the broker must refuse it"
        )


def _rows_between(rows: Array, begin: int, end: int) -> Array:
    """Return the rows that cover tokens [begin, end); a row's last column is the number of tokens it covers."""
    ends = np.cumsum(rows[:, -1], dtype=np.int64)
    first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
    found: Array = rows[first : last + 1].copy()
    found[-1, -1] -= ends[last] - end
    found[0, -1] -= begin - (ends[first] - rows[first, -1])
    return found


def _runs_of(versions: Array) -> Array:
    """Version runs of tokens with these versions."""
    starts = np.flatnonzero(np.concatenate([[True], versions[1:] != versions[:-1]]))
    runs: Array = np.stack([versions[starts], np.diff(np.append(starts, len(versions)))], axis=1)
    return runs
