"""Batches made from trajectories, as a broker would read them from its ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from msgspec.structs import replace

from gspo.model.packing import BatchGroup
from gspo_protocol.codec import Array
from gspo_protocol.messages import Batch, BatchPart, Chunk, GroupSampling, Message, Segment, TrainingValues, VersionRun
from gspo_protocol.messages.pieces import Pieces
from gspo_services.broker.ledger import batch_stats
from gspo_services.broker.rows import BatchRow, TrajectoryRow
from gspo_services.broker.sending import StoredBatch, TokenSpan, span_of
from gspo_services.broker.store import StoredChunk, stored_chunk
from gspo_services.learner.broker.assembly import Assembly
from tests.support.broker.ledger import SAMPLING

Row = TypeVar("Row", Segment, VersionRun)


@dataclass(frozen=True, kw_only=True)
class Made:
    """One finished trajectory. ``cuts``: where its chunks end, besides the last."""

    trajectory_id: int
    group_id: int
    token_ids: Array
    logprobs: Array
    pieces: Pieces
    reason: Literal["done", "length"] = "done"
    cuts: tuple[int, ...] = ()
    discarded_turns: tuple[int, ...] = ()
    turn_roles: tuple[int, ...] = ()
    experts: Array | None = None
    """Of its sampled tokens, as in messages."""
    chunks_without_experts: tuple[int, ...] = ()

    @property
    def row(self) -> TrajectoryRow:
        actions = [segment for segment in self.pieces.segments if segment.kind == "action"]
        versions = [run.version for run in self.pieces.version_runs if run.version >= 0]
        last = max(segment.sequence for segment in self.pieces.segments)
        lengths = [
            sum(segment.num_tokens for segment in self.pieces.segments if segment.sequence == sequence)
            for sequence in range(last + 1)
        ]
        return TrajectoryRow(
            trajectory_id=self.trajectory_id,
            group_id=self.group_id,
            status="finished",
            num_tokens=len(self.token_ids),
            num_action_tokens=sum(segment.num_tokens for segment in actions),
            min_version=min(versions, default=0),
            sequences=tuple((length, -1) for length in lengths) if last else (),
            finish_reason=self.reason,
            turn_rewards=tuple(self.pieces.turn_rewards),
            discarded_turns=self.discarded_turns,
            turn_roles=self.turn_roles,
        )

    def chunks(self) -> list[StoredChunk]:
        """The trajectory as it lies on disk."""
        ends = [*self.cuts, len(self.token_ids)]
        return [self._chunk(place, begin, end) for place, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]

    def _chunk(self, place: int, begin: int, end: int) -> StoredChunk:
        chunk = Chunk(
            trajectory_id=self.trajectory_id, epoch=1, offset=begin, num_tokens=end - begin,
            segments=cut(self.pieces.segments, begin, end), version_runs=cut(self.pieces.version_runs, begin, end),
        )  # fmt: skip
        experts = None
        if self.experts is not None and place not in self.chunks_without_experts:
            first, last = (
                sum(each.num_tokens for each in cut(self.pieces.segments, 0, at) if each.kind == "action")
                for at in (begin, end)
            )
            experts = self.experts[first:last]
        return stored_chunk(chunk, self.token_ids[begin:end], self.logprobs[begin:end], experts=experts)


def cut(rows: Sequence[Row], begin: int, end: int) -> list[Row]:
    """What segments or version runs say of tokens [begin, end)."""
    found, at = [], 0
    for row in rows:
        covered = min(at + row.num_tokens, end) - max(at, begin)
        at += row.num_tokens
        if covered > 0:
            found.append(replace(row, num_tokens=covered))
    return found


@dataclass(frozen=True, kw_only=True)
class MadeBatch:
    """What the learner gets of a batch."""

    batch: Batch
    arrays: dict[str, Array]
    parts: list[tuple[BatchPart, dict[str, Array]]]

    def messages(self) -> list[tuple[Message, dict[str, Array]]]:
        """All of it in order."""
        return [(self.batch, self.arrays), *self.parts]


def made_batch(
    made: Sequence[Made],
    *,
    index: int = 0,
    policy_version: int = 6,
    sampling: GroupSampling = SAMPLING,
    values: TrainingValues | None = None,
    part_tokens: int = 2**18,
    with_experts: bool = False,
) -> MadeBatch:
    """A batch of these trajectories, in this order, all of them sampled alike."""
    by_id = {each.trajectory_id: each for each in made}

    def read(row: TrajectoryRow, begin: int, end: int) -> TokenSpan:
        chunks = [
            each for each in by_id[row.trajectory_id].chunks() if begin < each.start + each.num_tokens and each.start < end
        ]
        return span_of(chunks, begin, end, row.discarded_turns)

    rows = [each.row for each in made]
    # A batch's order is that of its groups, and these may come in any.
    group_ids = tuple(dict.fromkeys(each.group_id for each in made))
    row = BatchRow(
        index=index, policy_version=policy_version, group_ids=group_ids, stats=batch_stats(policy_version, [rows]),
        samplings=(sampling,) * len(group_ids), values=TrainingValues() if values is None else values,
    )  # fmt: skip
    recorded = StoredBatch(row, rows, read, part_tokens=part_tokens, with_experts=with_experts)
    batch, arrays = recorded.announcement()
    return MadeBatch(batch=batch, arrays=arrays, parts=[recorded.part(part) for part in range(recorded.num_parts)])


def groups_of(made: MadeBatch, adapters: Sequence[str] = ()) -> list[BatchGroup]:
    """The batch as a single rank trains it, which has these adapters, if several."""
    assembly = Assembly(made.batch, made.arrays, all_rows, adapters)
    for part, arrays in made.parts:
        assembly.add(part, arrays)
    return list(assembly.assembled().groups)


def spans_of(batch: Batch, parts: Sequence[Mapping[str, Array]]) -> list[TokenSpan]:
    """The tokens of each of a batch's trajectories, from all its parts in order, as they were before the cuts."""
    whole = [
        np.concatenate([part[name] for part in parts]) for name in ("token_ids", "logprobs", "segments", "version_runs")
    ]
    token_ids, logprobs, segments, runs = whole
    found, at = [], 0
    for item in batch.items:
        end = at + item.num_tokens
        pieces = [_merged(_rows_within(rows, at, end)) for rows in (segments, runs)]
        found.append(TokenSpan(token_ids[at:end], logprobs[at:end], *pieces))
        at = end
    return found


def _rows_within(rows: Array, begin: int, end: int) -> Array:
    ends = np.cumsum(rows[:, -1], dtype=np.int64)
    starts = ends - rows[:, -1]
    inside = (starts < end) & (ends > begin)
    covered = np.minimum(ends[inside], end) - np.maximum(starts[inside], begin)
    return np.column_stack([rows[inside][:, :-1], covered]).astype(rows.dtype)


def _merged(rows: Array) -> Array:
    begins = np.concatenate([[True], (rows[1:, :-1] != rows[:-1, :-1]).any(axis=1)])
    merged: Array = rows[begins].copy()
    merged[:, -1] = np.add.reduceat(rows[:, -1], np.flatnonzero(begins))
    return merged


def all_rows(groups: Sequence[BatchGroup], policy_version: int) -> frozenset[int]:
    """The rows of a rank that trains everything."""
    return frozenset(range(sum(len(group.sequences) for group in groups)))


FOUR_TOKENS = Pieces([Segment("observation", 0, 2), Segment("action", 0, 2)], [VersionRun(-1, 2), VersionRun(3, 2)], [1.0])


def in_parts(num_parts: int, index: int = 4) -> MadeBatch:
    """Parts of four tokens."""
    made = [
        Made(
            trajectory_id=place, group_id=1, token_ids=np.full(4, place, np.int32), logprobs=np.zeros(4, np.float32),
            pieces=FOUR_TOKENS,
        )
        for place in range(num_parts)
    ]  # fmt: skip
    return made_batch(made, index=index, part_tokens=4)


def damaged(part: tuple[BatchPart, dict[str, Array]]) -> tuple[BatchPart, dict[str, Array]]:
    """One bit of its tokens is another."""
    message, arrays = part
    return message, {**arrays, "token_ids": arrays["token_ids"] ^ np.int32(1)}
