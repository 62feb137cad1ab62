"""Tokens as they are stored and joined again: chunks on disk <-> leases and batches on the wire."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgpack
import msgspec
import numpy as np

from gspo_protocol.codec import Array
from gspo_protocol.messages import Chunk, Plain, Segment, VersionRun
from gspo_protocol.messages.base import require_plain
from gspo_protocol.messages.experts import sampled_between
from gspo_protocol.messages.gathered import Gathered
from gspo_protocol.messages.pieces import KINDS
from gspo_protocol.messages.stretches import Stretch
from gspo_services.broker.ledger import extended_row
from gspo_services.broker.rows import Row, TrajectoryRow

CHUNK_COLUMNS: Final = "trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs, checksum"


class StoredExperts(msgspec.Struct, frozen=True, array_like=True):
    """The array of ``gspo_protocol.messages.experts``: the shape of a token's row, and all rows."""

    shape: tuple[int, int, int]
    rows: bytes


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """What is stored of a chunk besides its tokens."""

    segments: list[Segment]
    version_runs: list[VersionRun]
    state: Plain | None
    turn_done: bool
    turn_rewards: list[float]
    peer: str
    """The rollout that made it."""
    experts: StoredExperts | None = None
    """Of its sampled tokens. Without them nothing is stored here: the header is that of a run without replay."""

    def experts_between(self, begin: int, end: int) -> tuple[Array | None, int]:
        """Those of its tokens [begin, end), as in messages, or None; and how many of these tokens were sampled."""
        spans = np.array([(KINDS.index(each.kind), each.num_tokens) for each in self.segments])
        first, last = sampled_between(spans, begin, end)
        if self.experts is None:
            return None, last - first
        rows = np.frombuffer(self.experts.rows, np.uint8).reshape(-1, *self.experts.shape)
        return rows[first:last], last - first


class StoredChunk(NamedTuple):
    """One chunk as it lies on disk: little-endian int32 token ids and float32 log-probs."""

    trajectory_id: int
    start: int
    epoch: int
    num_tokens: int
    header: bytes
    token_ids: bytes
    logprobs: bytes
    checksum: int
    """Checksum of all the others, taken as they came in: SQLite does not notice when a disk changes a byte of them."""


def chunk_of_row(values: tuple[Any, ...]) -> StoredChunk:
    """A chunk from CHUNK_COLUMNS."""
    return StoredChunk(*values)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """All acknowledged tokens of one trajectory."""

    token_ids: Array
    logprobs: Array
    segments: list[Segment]
    version_runs: list[VersionRun]
    state: Plain | None
    turn_done: bool
    turn_rewards: list[float]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def stored_chunk(
    chunk: Chunk, token_ids: Array, logprobs: Array, peer: str = "", experts: Array | None = None
) -> StoredChunk:
    """A chunk that came in, for the disk; ``peer`` made it."""
    content: tuple[Any, ...] = (
        chunk.segments, chunk.version_runs, chunk.state, chunk.turn_done, chunk.turn_rewards, peer,
    )  # fmt: skip
    if experts is not None:
        content = (*content, (experts.shape[1:], experts.tobytes()))
    header: bytes = _PACK(content)
    token_bytes = token_ids.astype("<i4", copy=False).tobytes()
    logprob_bytes = logprobs.astype("<f4", copy=False).tobytes()
    place = (chunk.trajectory_id, chunk.offset, chunk.epoch, chunk.num_tokens)
    return StoredChunk(
        trajectory_id=chunk.trajectory_id,
        start=chunk.offset,
        epoch=chunk.epoch,
        num_tokens=chunk.num_tokens,
        header=header,
        token_ids=token_bytes,
        logprobs=logprob_bytes,
        checksum=chunk_checksum(place, header, token_bytes, logprob_bytes),
    )


def stored_chunks(chunks: Gathered, stretches: Sequence[Stretch], peer: str) -> list[StoredChunk]:
    """Those of many chunks that the ledger has taken: one for each stretch, as if it had come as one chunk."""
    all_ids, all_logprobs = chunks.token_bytes("token_ids"), chunks.token_bytes("logprobs")
    stored = []
    headers: dict[tuple[Any, ...], bytes] = {}
    for stretch in stretches:
        places, trajectory_id, epoch, offset, num_tokens, is_usual, turn, versions, _, _, has_state, turn_done = stretch
        if not is_usual:
            chunk, arrays = chunks.chunk(places[0])
            stored.append(stored_chunk(chunk, arrays["token_ids"], arrays["logprobs"], peer))
            continue
        if len(places) == 1:
            token_ids, logprobs = all_ids[places[0]], all_logprobs[places[0]]
        else:
            token_ids, logprobs = (b"".join([each[at] for at in places]) for each in (all_ids, all_logprobs))
        # Most chunks of a message have the same header.
        content = (num_tokens, turn, versions, has_state, turn_done)
        header = headers.get(content)
        if header is None:
            segments = [("action", turn, num_tokens, 0)]
            state: Plain | None = {} if has_state else None
            header = headers[content] = _PACK((segments, versions, state, turn_done, (), peer))
        at = (trajectory_id, offset, epoch, num_tokens)
        checksum = chunk_checksum(at, header, token_ids, logprobs)
        stored.append(_STORED((*at, header, token_ids, logprobs, checksum)))
    return stored


# Not its constructor, which is a function of Python's own.
_STORED: Final[Callable[[tuple[Any, ...]], StoredChunk]] = partial(tuple.__new__, StoredChunk)
_PACK: Final = msgspec.msgpack.Encoder().encode


def chunk_checksum(place: tuple[int, int, int, int], header: bytes, token_ids: bytes, logprobs: bytes) -> int:
    """CRC-32 of a chunk's stored bytes, in this order. ``place``: trajectory, start, epoch, number of tokens."""
    start = zlib.crc32(b"%d %d %d %d" % place)
    return zlib.crc32(logprobs, zlib.crc32(token_ids, zlib.crc32(header, start)))


def chunk_header(header: bytes) -> ChunkHeader:
    """Decode a stored header. Raises: ValueError when it is none."""
    try:
        content = msgspec.convert(msgpack.unpackb(header, raw=False), ChunkHeader)
        require_plain("state", content.state)
        return content
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a chunk's header: {error}") from error


def checked_chunks(chunks: Iterable[StoredChunk], start: int) -> Iterator[tuple[StoredChunk, ChunkHeader]]:
    """Each chunk with its header, where the first starts at ``start`` and each goes on from the one before.

    Raises: ValueError when there is a gap between them, or they are not what was stored.
    """
    for chunk in chunks:
        if chunk.start != start:
            raise ValueError(f"trajectory {chunk.trajectory_id}: a chunk starts at {chunk.start}, {start} expected")
        place = (chunk.trajectory_id, chunk.start, chunk.epoch, chunk.num_tokens)
        if chunk_checksum(place, chunk.header, chunk.token_ids, chunk.logprobs) != chunk.checksum:
            raise ValueError(f"trajectory {chunk.trajectory_id}: the chunk at {chunk.start} was changed on the disk")
        start += chunk.num_tokens
        yield chunk, chunk_header(chunk.header)


def caught_up(rows: Iterable[Row], chunks_after: Callable[[int, int], Sequence[StoredChunk]]) -> Iterator[Row]:
    """The rows, where that of a leased trajectory may be behind its chunks: with those that it is behind.

    ``chunks_after`` gives a trajectory's chunks from a token on. Raises: ValueError when they do not continue the row.
    """
    for row in rows:
        if isinstance(row, TrajectoryRow) and row.status == "leased":
            after = chunks_after(row.trajectory_id, row.num_tokens)
            row = _with_chunks(row, after) if after else row
        yield row


def _with_chunks(row: TrajectoryRow, chunks: Sequence[StoredChunk]) -> TrajectoryRow:
    for chunk, header in checked_chunks(chunks, row.num_tokens):
        kinds = {(segment.kind, segment.turn, segment.sequence) for segment in header.segments}
        if chunk.epoch != row.epoch or kinds != {("action", row.num_turns - 1, 0)}:
            raise ValueError(f"trajectory {row.trajectory_id}: the chunk at {chunk.start} does not continue its row")
        row = extended_row(row, [(run.version, run.num_tokens) for run in header.version_runs])
    return row


def join(chunks: Sequence[StoredChunk]) -> Payload:
    """One trajectory from its chunks in order.

    Raises: ValueError when there is a gap between them, or they are not what was stored.
    """
    segments: list[Segment] = []
    runs: list[VersionRun] = []
    state: Plain | None = None
    turn_done = False
    turn_rewards: list[float] = []
    for _, header in checked_chunks(chunks, 0):
        segments += header.segments
        runs += header.version_runs
        state = state if header.state is None else header.state
        turn_done = header.turn_done
        turn_rewards += header.turn_rewards
    return Payload(
        token_ids=_concatenate((chunk.token_ids for chunk in chunks), "<i4"),
        logprobs=_concatenate((chunk.logprobs for chunk in chunks), "<f4"),
        segments=merge_segments(segments),
        version_runs=merge_runs(runs),
        state=state,
        turn_done=turn_done,
        turn_rewards=turn_rewards,
    )


def merge_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Merge adjacent segments of the same kind, turn and sequence: how an episode was cut into chunks leaves no trace."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if last and (last.kind, last.turn, last.sequence) == (segment.kind, segment.turn, segment.sequence):
            segment = Segment(segment.kind, segment.turn, merged.pop().num_tokens + segment.num_tokens, segment.sequence)
        merged.append(segment)
    return merged


def merge_runs(runs: Iterable[VersionRun]) -> list[VersionRun]:
    """Merge adjacent runs of the same version."""
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].version == run.version:
            run = VersionRun(run.version, merged.pop().num_tokens + run.num_tokens)
        merged.append(run)
    return merged


def _concatenate(parts: Iterable[bytes], dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(parts), dtype=dtype)
