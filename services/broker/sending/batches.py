"""A recorded batch as messages: what it consists of, from its rows alone, and its tokens in parts, each read when it is
asked for and then forgotten. The same rows give the same bytes.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from gspo_protocol.codec import Array
from gspo_protocol.digests import part_digest
from gspo_protocol.limits import MAX_EXPERT_BYTES, MAX_FRAME_BYTES
from gspo_protocol.messages import Batch, BatchItem, BatchPart
from gspo_protocol.messages.experts import joined_experts, sampled_between
from gspo_protocol.messages.pieces import ACTION, KINDS
from gspo_services.broker.rows import BatchRow, TrajectoryRow
from gspo_services.broker.store import ChunkHeader, Reader, StoreCorrupt, StoredChunk, checked_chunks

DISCARDED: Final = KINDS.index("discarded")
MANY: Final = 2**62
MOST_TOKENS_WITH_EXPERTS: Final = MAX_FRAME_BYTES // MAX_EXPERT_BYTES
"""Tokens of a part whose experts fit one frame of a message, whatever the model."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one trajectory, and what covers them; the arrays of ``gspo_protocol.messages.pieces``."""

    token_ids: Array
    logprobs: Array
    segments: Array
    version_runs: Array
    experts: Array | None = None
    """None: of none of its tokens."""


ReadSpan = Callable[[TrajectoryRow, int, int], TokenSpan]
"""The tokens [begin, end) of a trajectory, without what is discarded."""


class StoredBatch:
    """One batch, whose tokens are read as they are asked for."""

    def __init__(
        self,
        row: BatchRow,
        trajectories: Sequence[TrajectoryRow],
        read: ReadSpan,
        *,
        part_tokens: int,
        with_experts: bool = False,
    ) -> None:
        """``trajectories``: in the batch's order. ``with_experts``: with what engines reported, and so in smaller parts."""
        self._row = row
        self._trajectories = trajectories
        self._read = read
        self._part_tokens = min(part_tokens, MOST_TOKENS_WITH_EXPERTS) if with_experts else part_tokens
        self._with_experts = with_experts
        self._ends = list(accumulate(trajectory.num_tokens for trajectory in trajectories))

    @property
    def index(self) -> int:
        return self._row.index

    @property
    def num_parts(self) -> int:
        return -(-self._ends[-1] // self._part_tokens)

    def announcement(self) -> tuple[Batch, dict[str, Array]]:
        """What the batch consists of. Tokens are read only of trajectories with several sequences or discarded turns.

        Raises: what ``read`` raises.
        """
        items, sequences = [], []
        samplings = dict(zip(self._row.group_ids, self._row.samplings, strict=True))
        for trajectory in self._trajectories:
            assert trajectory.finish_reason is not None, trajectory
            own, oldest = self._outline(trajectory)
            sampling = samplings[trajectory.group_id]
            sequences += own
            items.append(
                BatchItem(
                    trajectory.trajectory_id,
                    trajectory.group_id,
                    trajectory.num_tokens,
                    len(own),
                    len(trajectory.turn_rewards),
                    oldest,
                    trajectory.finish_reason,
                    sampling.temperature,
                    sampling.max_tokens,
                    sampling.adapter,
                )
            )
        message = Batch(
            index=self._row.index,
            policy_version=self._row.policy_version,
            part_tokens=self._part_tokens,
            items=items,
            values=self._row.values,
        )
        rewards = [reward for trajectory in self._trajectories for reward in trajectory.turn_rewards]
        arrays = {
            "turn_rewards": np.array(rewards, "<f8"),
            "sequences": np.array(sequences, "<i4").reshape(len(sequences), 2),
        }
        if any(trajectory.turn_roles for trajectory in self._trajectories):
            roles = [each.turn_roles or (0,) * len(each.turn_rewards) for each in self._trajectories]
            arrays["turn_roles"] = np.concatenate([np.array(each, np.uint8) for each in roles])
        if any(trajectory.discarded_turns for trajectory in self._trajectories):
            arrays["turn_discarded"] = np.concatenate(
                [
                    np.isin(np.arange(len(each.turn_rewards)), each.discarded_turns).astype(np.uint8)
                    for each in self._trajectories
                ]
            )
        return message, arrays

    def part(self, number: int) -> tuple[BatchPart, dict[str, Array]]:
        """The tokens of one part. Raises: ValueError when the batch has no such part; what ``read`` raises."""
        if not 0 <= number < self.num_parts:
            raise ValueError(f"batch {self.index} has {self.num_parts} parts, counted from 0: there is no part {number}")
        begin = number * self._part_tokens
        end = min(begin + self._part_tokens, self._ends[-1])
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        arrays: dict[str, Array] = {
            "token_ids": np.empty(end - begin, "<i4"),
            "logprobs": np.empty(end - begin, "<f4"),
        }
        segments, runs, experts = [], [], list[tuple[Array | None, int]]()
        at = 0
        for place in range(first, last + 1):
            trajectory = self._trajectories[place]
            start = self._ends[place] - trajectory.num_tokens
            span = self._read(trajectory, max(begin - start, 0), min(end - start, trajectory.num_tokens))
            # One trajectory after another: what was read of it is forgotten before the next is read.
            for name, tokens in (("token_ids", span.token_ids), ("logprobs", span.logprobs)):
                arrays[name][at : at + len(tokens)] = tokens
            at += len(span.token_ids)
            segments.append(span.segments)
            runs.append(span.version_runs)
            if self._with_experts:
                experts.append((span.experts, sampled_between(span.segments, 0, len(span.token_ids))[1]))
        arrays |= {"segments": np.concatenate(segments), "version_runs": np.concatenate(runs)}
        known = joined_experts(experts)
        arrays |= {} if known is None else {"experts": known}
        return BatchPart(index=self.index, part=number, digest=part_digest(self.index, number, arrays)), arrays

    def _outline(self, trajectory: TrajectoryRow) -> tuple[list[tuple[int, int]], int]:
        """Tokens and action tokens of each sequence that is trained, and the oldest version of an action token."""
        if not trajectory.sequences and not trajectory.discarded_turns:
            return [(trajectory.num_tokens, trajectory.num_action_tokens)], trajectory.min_version
        span = self._read(trajectory, 0, trajectory.num_tokens)
        kinds, _, sequences, lengths = span.segments.T
        is_action = kinds == ACTION
        versions = np.repeat(span.version_runs[:, 0], span.version_runs[:, 1])[np.repeat(is_action, lengths)]
        oldest = int(versions.min()) if len(versions) else 0
        if not sequences.any():
            return [(trajectory.num_tokens, int(lengths[is_action].sum()))], oldest
        trained = np.unique(sequences[is_action])
        tokens, actions = (np.bincount(sequences, lengths * chosen) for chosen in (np.ones_like(lengths), is_action))
        return [(int(tokens[each]), int(actions[each])) for each in trained], oldest


def recorded_batch(reader: Reader, index: int, *, part_tokens: int, with_experts: bool = False) -> StoredBatch:
    """Batch ``index`` of a ledger; only its rows are read now. Raises: StoreCorrupt when it is not there."""
    return batch_of_groups(reader, reader.batch_row(index), part_tokens=part_tokens, with_experts=with_experts)


def batch_of_groups(reader: Reader, row: BatchRow, *, part_tokens: int, with_experts: bool = False) -> StoredBatch:
    """The batch that ``row`` describes, of groups that the ledger has."""
    members = members_of(reader, row.group_ids)

    def read(trajectory: TrajectoryRow, begin: int, end: int) -> TokenSpan:
        return _read_span(reader, trajectory, begin, end)

    return StoredBatch(row, members, read, part_tokens=part_tokens, with_experts=with_experts)


def members_of(reader: Reader, group_ids: Sequence[int]) -> list[TrajectoryRow]:
    """The trajectories of groups, in the order of the groups. Raises: StoreCorrupt."""
    return [
        trajectory
        for group_id in group_ids
        for trajectory in reader.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (group_id,))
    ]


def span_of(chunks: Sequence[StoredChunk], begin: int, end: int, discarded_turns: Sequence[int] = ()) -> TokenSpan:
    """The tokens [begin, end) of a trajectory, from the chunks that hold them. Actions of ``discarded_turns`` are context at
    most.

    Raises: ValueError when the chunks do not cover them, or are not what was stored.
    """
    start = chunks[0].start if chunks else begin
    if start > begin:
        raise ValueError(f"trajectory {chunks[0].trajectory_id}: a chunk starts at {start}, token {begin} is in none")
    at = begin
    segments, runs = _Rows(), _Rows()
    token_ids, logprobs = [np.zeros(0, "<i4")], [np.zeros(0, "<f4")]
    pieces: list[tuple[ChunkHeader, int, int]] = []
    for chunk, header in checked_chunks(chunks, start):
        low, high = max(begin - chunk.start, 0), min(end - chunk.start, chunk.num_tokens)
        token_ids.append(np.frombuffer(chunk.token_ids, "<i4")[low:high])
        logprobs.append(np.frombuffer(chunk.logprobs, "<f4")[low:high])
        segments.add(
            [(KINDS.index(each.kind), each.turn, each.sequence, each.num_tokens) for each in header.segments], low, high
        )
        runs.add([(run.version, run.num_tokens) for run in header.version_runs], low, high)
        pieces.append((header, low, high))
        at = chunk.start + high
    if at != end:
        raise ValueError(f"the chunks end at token {at}, {end} expected")
    rows = np.array(segments.rows, "<i4").reshape(len(segments.rows), 4)
    if discarded_turns:
        rows[(rows[:, 0] == ACTION) & np.isin(rows[:, 1], discarded_turns), 0] = DISCARDED
    run_rows = np.array(runs.rows, "<i8").reshape(len(runs.rows), 2)
    experts = None
    if any(header.experts is not None for header, *_ in pieces):
        experts = joined_experts([header.experts_between(first, last) for header, first, last in pieces])
    return TokenSpan(np.concatenate(token_ids), np.concatenate(logprobs), rows, run_rows, experts)


class _Rows:
    """Rows whose last number says how many tokens they cover. Adjacent rows that differ in nothing else are one: how an
    episode was cut into chunks leaves no trace."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def add(self, rows: Sequence[tuple[int, ...]], low: int, high: int) -> None:
        """Add what the rows of one chunk say of its tokens [low, high)."""
        at = 0
        for *what, num_tokens in rows:
            covered = min(at + num_tokens, high) - max(at, low)
            at += num_tokens
            if covered <= 0:
                continue
            if self.rows and list(self.rows[-1][:-1]) == what:
                covered += self.rows.pop()[-1]
            self.rows.append((*what, covered))


def _read_span(reader: Reader, trajectory: TrajectoryRow, begin: int, end: int) -> TokenSpan:
    is_last = end == trajectory.num_tokens
    chunks = reader.chunks(trajectory.trajectory_id, begin, MANY if is_last else end)
    stored = chunks[-1].start + chunks[-1].num_tokens if chunks else 0
    if is_last and stored != trajectory.num_tokens:
        raise StoreCorrupt(
            f"{reader.path}: trajectory {trajectory.trajectory_id} has {stored} tokens in its chunks, "
            f"{trajectory.num_tokens} in its row"
        )
    try:
        return span_of(chunks, begin, end, trajectory.discarded_turns)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreCorrupt(f"{reader.path}: {error}") from error
