"""Many chunks in one message: columns instead of an object for each, so that a chunk costs little beside its tokens.

    chunks          int64 [n, 9]: one row for each chunk, COLUMNS
    token_ids, logprobs, segments, version_runs, turn_rewards: those of all chunks, end to end (``pieces``)
    states          uint8: the states that chunks bring, as msgpack, end to end

Each chunk is taken or refused by itself. So the message's own checks say only which bytes belong to which chunk; a chunk
whose values are wrong is refused with its place, and costs the others nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from gspo_protocol import limits
from gspo_protocol.messages.base import MAX_LOGPROB, Message, Plain
from gspo_protocol.messages.pieces import ACTION, KINDS, PIECE_ARRAYS, Pieces, piece_arrays
from gspo_protocol.messages.stretches import ChunkColumns, Column, Stretch, StretchColumns, find_stretches
from gspo_protocol.messages.work import Chunk

Arrays = Mapping[str, Column]
COLUMNS: Final = (
    "trajectory_id", "epoch", "offset", "num_tokens", "num_segments", "num_runs", "num_rewards", "state_bytes", "turn_done",
)  # fmt: skip
TRAJECTORY, EPOCH, OFFSET, TOKENS, SEGMENTS, RUNS, REWARDS, STATE, DONE = range(len(COLUMNS))
_MOST: Final = {
    TOKENS: (limits.MAX_GATHERED_TOKENS, "MAX_GATHERED_TOKENS"),
    SEGMENTS: (limits.MAX_SEGMENTS, "MAX_SEGMENTS"),
    RUNS: (limits.MAX_RUNS, "MAX_RUNS"),
    REWARDS: (limits.MAX_TURNS, "MAX_TURNS"),
    STATE: (limits.MAX_STATE_BYTES, "MAX_STATE_BYTES"),
}
"""Limits for all chunks of a message together."""
_PARTS: Final = {
    TOKENS: ("token_ids", "logprobs"),
    SEGMENTS: ("segments",),
    RUNS: ("version_runs",),
    REWARDS: ("turn_rewards",),
    STATE: ("states",),
}
_WIDTHS: Final = {"segments": 4, "version_runs": 2}
NO_STATE: Final = b""
"""The chunk does not change the state."""
EMPTY_STATE: Final = b"\x80"


class Chunks(Message, frozen=True, tag="chunks"):
    """Rollout -> broker: chunks of one or more trajectories, in order; acknowledged together, once all that were taken are
    durable. Each is what a Chunk is (idempotent by trajectory, epoch and offset), and is taken or refused by itself.
    """

    ARRAYS: ClassVar[dict[str, str]] = {
        "chunks": "int64", "token_ids": "int32", "logprobs": "float32", **PIECE_ARRAYS, "states": "uint8",
    }  # fmt: skip

    num_chunks: Annotated[int, Meta(ge=1, le=limits.MAX_CHUNKS_PER_MESSAGE)]

    def check_arrays(self, arrays: Arrays) -> None:
        columns = arrays["chunks"]
        if columns.shape != (self.num_chunks, len(COLUMNS)):
            raise ValueError(f"array chunks has shape {columns.shape}, expected {(self.num_chunks, len(COLUMNS))}")
        for column, name in enumerate(COLUMNS):
            least, most = int(column in (TOKENS, SEGMENTS, RUNS)), 1 if column == DONE else 2**53
            outside = (columns[:, column] < least) | (columns[:, column] > most)
            if outside.any():
                place = int(outside.argmax())
                value = int(columns[place, column])
                raise ValueError(f"array chunks[{place}] has {name} {value}, {least} to {most} allowed")
        for column, (most, limit) in _MOST.items():
            total = int(columns[:, column].sum())
            if total > most:
                raise ValueError(f"array chunks has {total} in column {COLUMNS[column]}, {most} allowed ({limit})")
            for name in _PARTS[column]:
                shape = (total, _WIDTHS[name]) if name in _WIDTHS else (total,)
                if arrays[name].shape != shape:
                    raise ValueError(f"array {name} has shape {arrays[name].shape}, the chunks have {total} of it together")


def gather(chunks: Sequence[tuple[Chunk, Arrays]]) -> tuple[Chunks, dict[str, np.ndarray[Any, Any]]]:
    """One message of chunks with their arrays. The chunks must fit one: see ``gspo_protocol.limits``."""
    states = [NO_STATE if chunk.state is None else msgpack.packb(chunk.state, use_bin_type=True) for chunk, _ in chunks]
    rows = [
        (
            chunk.trajectory_id, chunk.epoch, chunk.offset, chunk.num_tokens, len(chunk.segments), len(chunk.version_runs),
            len(chunk.turn_rewards), len(state), chunk.turn_done,
        )
        for (chunk, _), state in zip(chunks, states, strict=True)
    ]  # fmt: skip
    return Chunks(num_chunks=len(chunks)), {
        "chunks": np.array(rows, "<i8").reshape(len(rows), len(COLUMNS)),
        "token_ids": np.concatenate([arrays["token_ids"] for _, arrays in chunks]),
        "logprobs": np.concatenate([arrays["logprobs"] for _, arrays in chunks]),
        **piece_arrays([Pieces(chunk.segments, chunk.version_runs, chunk.turn_rewards) for chunk, _ in chunks]),
        "states": np.frombuffer(b"".join(states), np.uint8),
    }


class Gathered:
    """The chunks of a message that was checked, each by its place. What can be seen of all at once is."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._ends = arrays["chunks"][:, TOKENS : STATE + 1].cumsum(axis=0)
        self._chunks: dict[int, tuple[Chunk, dict[str, np.ndarray[Any, Any]]]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    @cached_property
    def rows(self) -> list[list[int]]:
        """By chunk: COLUMNS."""
        rows: list[list[int]] = self._arrays["chunks"].tolist()
        return rows

    @cached_property
    def _bounds(self) -> list[list[int]]:
        bounds: list[list[int]] = self._ends.tolist()
        return bounds

    def _range(self, place: int, column: int) -> tuple[int, int]:
        end = self._bounds[place][column - TOKENS]
        return end - self.rows[place][column], end

    @cached_property
    def stretches(self) -> list[Stretch]:
        """All chunks, each in one stretch, in the order of their first ones. Chunks of one trajectory keep their order."""
        return self._found[0]

    @cached_property
    def stretch_columns(self) -> StretchColumns:
        """The same as arrays."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[list[Stretch], StretchColumns]:
        columns = self._arrays["chunks"]
        is_usual, turn, version = self._usual()
        return find_stretches(
            ChunkColumns(
                trajectory_id=columns[:, TRAJECTORY],
                epoch=columns[:, EPOCH],
                offset=columns[:, OFFSET],
                num_tokens=columns[:, TOKENS],
                is_usual=is_usual,
                turn=turn,
                version=version,
                largest_token_id=self._largest,
                state_bytes=columns[:, STATE],
                turn_done=columns[:, DONE],
            )
        )

    def alone(self, place: int) -> Stretch:
        """One chunk by itself, as one of any kind."""
        trajectory_id, epoch, offset, num_tokens, *_ = self.rows[place]
        return Stretch((place,), trajectory_id, epoch, offset, num_tokens, is_usual=False)

    def _usual(self) -> tuple[np.ndarray[Any, Any], ...]:
        """By chunk: whether it is more tokens of one action, by one version, with nothing else, and its values are possible;
        its turn, its version. What is not usual is known from ``chunk`` alone.
        """
        columns = self._arrays["chunks"]
        starts = self._ends - columns[:, TOKENS : STATE + 1]
        tokens, (segments, runs) = columns[:, TOKENS], (starts[:, column - TOKENS] for column in (SEGMENTS, RUNS))
        kind, turn, sequence, in_segment = self._arrays["segments"][segments].T
        version, in_run = self._arrays["version_runs"][runs].T
        usual = (
            (columns[:, SEGMENTS] == 1) & (columns[:, RUNS] == 1) & (columns[:, REWARDS] == 0)
            & (kind == ACTION) & (sequence == 0) & (turn >= 0) & (turn <= limits.MAX_TURNS)
            & (in_segment == tokens) & (in_run == tokens) & (version >= 1) & (version <= limits.MAX_VERSION)
            & self._is_possible & self._has_simple_state(columns[:, STATE], starts[:, -1])
        )  # fmt: skip
        return usual, turn, version

    @cached_property
    def _is_possible(self) -> Column:
        """By chunk: whether ``check_tokens`` has nothing against its values."""
        token_ids, logprobs = self._arrays["token_ids"], self._arrays["logprobs"]
        # A NaN fails both comparisons.
        possible = (logprobs >= limits.MIN_LOGPROB) & (logprobs <= MAX_LOGPROB) & (token_ids >= 0)
        is_possible: Column = np.logical_and.reduceat(possible, self._token_starts)
        return is_possible

    @cached_property
    def _largest(self) -> Column:
        """By chunk: its largest token id."""
        largest: Column = np.maximum.reduceat(self._arrays["token_ids"], self._token_starts)
        return largest

    @property
    def _token_starts(self) -> Column:
        starts: Column = self._ends[:, 0] - self._arrays["chunks"][:, TOKENS]
        return starts

    def largest_token_id(self, place: int) -> int:
        """Return one chunk's largest token id."""
        return int(self._largest[place])

    def _has_simple_state(self, num_bytes: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return whether nothing can be wrong with a chunk's state: it has none, or an empty one."""
        states = np.append(self._arrays["states"], np.uint8(0))
        simple: np.ndarray[Any, Any] = (num_bytes == 0) | ((num_bytes == 1) & (states[starts] == EMPTY_STATE[0]))
        return simple

    def chunk(self, place: int) -> tuple[Chunk, dict[str, np.ndarray[Any, Any]]]:
        """Return one chunk as a separate message, checked as one.

        Raises: ValueError with the field and the value for one that no Chunk may be.
        """
        if place not in self._chunks:
            self._chunks[place] = self._chunk(place)
        return self._chunks[place]

    def _chunk(self, place: int) -> tuple[Chunk, dict[str, np.ndarray[Any, Any]]]:
        row = self.rows[place]
        pieces = self.pieces(place)
        arrays = {name: self._arrays[name][slice(*self._range(place, TOKENS))] for name in ("token_ids", "logprobs")}
        plain = {
            **dict(zip(COLUMNS[: TOKENS + 1], row, strict=False)),
            "type": "chunk",
            "segments": [_segment(index, *segment) for index, segment in enumerate(pieces.segments)],
            "version_runs": pieces.version_runs,
            "state": self._state(place),
            "turn_done": bool(row[DONE]),
            "turn_rewards": pieces.turn_rewards,
        }
        try:
            chunk = msgspec.convert(plain, Chunk)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(str(error)) from error
        chunk.check_plain()
        if not self._is_possible[place]:
            chunk.check_arrays(arrays)  # It says what is wrong.
        return chunk, arrays

    def pieces(self, place: int) -> "RawPieces":
        """Return a chunk's contents besides tokens, as they came."""
        return RawPieces(
            *(self._arrays[_PARTS[column][0]][slice(*self._range(place, column))].tolist() for column in _PIECES)
        )

    def state(self, place: int) -> bytes:
        """As msgpack; NO_STATE when the chunk does not change it."""
        return self._arrays["states"][slice(*self._range(place, STATE))].tobytes()

    def _state(self, place: int) -> Plain | None:
        packed = self.state(place)
        try:
            state: Plain | None = None if packed == NO_STATE else msgpack.unpackb(packed, raw=False, strict_map_key=True)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise ValueError(f"state is not msgpack: {type(error).__name__}: {error}") from error
        return state

    def token_bytes(self, name: str) -> list[bytes]:
        """By chunk: its token ids or log-probs, little-endian."""
        data = self._arrays[name].tobytes()
        ends = [0, *(self._ends[:, 0] * self._arrays[name].itemsize).tolist()]
        return [data[begin:end] for begin, end in pairwise(ends)]


_PIECES: Final = (SEGMENTS, RUNS, REWARDS)


class RawPieces(NamedTuple):
    """Rows as they came: [kind, turn, sequence, tokens], [version, tokens], and rewards."""

    segments: list[list[int]]
    version_runs: list[list[int]]
    turn_rewards: list[float]


def _segment(index: int, kind: int, turn: int, sequence: int, num_tokens: int) -> list[Any]:
    """Return a segment as it travels in a header. Raises: ValueError for a kind that does not exist."""
    if not 0 <= kind < len(KINDS):
        raise ValueError(f"segments[{index}] has kind {kind}: expected 0 to {len(KINDS) - 1}")
    return [KINDS[kind], turn, num_tokens, sequence]
