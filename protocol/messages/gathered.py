"""Many chunks in one message: columns instead of an object for each, so that a chunk costs little beside its tokens.

    chunks          int64 [n, 9]: one row for each chunk, COLUMNS
    token_ids, logprobs, segments, version_runs, turn_rewards: those of all chunks, end to end (protocol.messages.pieces)
    states          uint8: the states that chunks bring, as msgpack, end to end

Each chunk is taken or refused by itself. So the message's own checks say only which bytes belong to which chunk; a chunk
whose values are wrong is refused with its place, and costs the others nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgpack
import msgspec
import numpy as np
from msgspec import Meta

from protocol import limits
from protocol.messages.base import MAX_LOGPROB, Message, Plain
from protocol.messages.pieces import ACTION, KINDS, PIECE_ARRAYS, Pieces, piece_arrays
from protocol.messages.work import Chunk

Arrays = Mapping[str, np.ndarray[Any, Any]]
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
"""Of all chunks of a message together."""
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
    """One message of chunks with their arrays. The chunks must fit one: see ``protocol.limits``."""
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


class Stretch(NamedTuple):
    """Chunks of one trajectory that follow one another. ``is_usual``: all are more tokens of one action, with nothing else,
    by versions that do not go back; otherwise it is one chunk of any kind, and what follows ``is_usual`` is not known.
    """

    places: Sequence[int]
    trajectory_id: int
    epoch: int
    offset: int
    num_tokens: int
    is_usual: bool
    turn: int = 0
    versions: Sequence[tuple[int, int]] = ()
    """Each version with its number of tokens."""
    version_sum: int = 0
    """Sum over the tokens of the version that made them."""
    largest_token_id: int = 0
    has_state: bool = False
    """An empty one."""
    turn_done: bool = False


class Gathered:
    """The chunks of a message that was checked, each by its place. What can be seen of all at once is."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.rows: list[list[int]] = arrays["chunks"].tolist()
        """By chunk: COLUMNS."""
        self._ends = arrays["chunks"][:, TOKENS : STATE + 1].cumsum(axis=0)
        self._bounds: list[list[int]] = self._ends.tolist()
        self._chunks: dict[int, tuple[Chunk, dict[str, np.ndarray[Any, Any]]]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def _range(self, place: int, column: int) -> tuple[int, int]:
        end = self._bounds[place][column - TOKENS]
        return end - self.rows[place][column], end

    @cached_property
    def stretches(self) -> list[Stretch]:
        """All chunks, each in one stretch, in the order of their first ones. Chunks of one trajectory keep their order."""
        columns = self._arrays["chunks"]
        order = np.lexsort((columns[:, EPOCH], columns[:, TRAJECTORY]))
        trajectory, epoch, offset, tokens, *_, state_bytes, done = columns[order].T
        usual, turn, version, largest = (each[order] for each in self._usual())
        goes_on = (
            usual[1:] & usual[:-1] & (trajectory[1:] == trajectory[:-1]) & (epoch[1:] == epoch[:-1])
            & (turn[1:] == turn[:-1]) & (offset[1:] == offset[:-1] + tokens[:-1]) & (version[1:] >= version[:-1])
        )  # fmt: skip
        begins = np.flatnonzero(np.append(True, ~goes_on))
        lasts = np.append(begins[1:], len(order)) - 1
        places = _cut(order, begins, lasts)
        by_chunk = list(zip(version.tolist(), tokens.tolist(), strict=True))
        num_tokens = np.add.reduceat(tokens, begins).tolist()
        versions = [
            ((by_chunk[first][0], total),)
            if by_chunk[first][0] == by_chunk[last][0]
            else _merged(by_chunk[first : last + 1])
            for first, last, total in zip(begins.tolist(), lasts.tolist(), num_tokens, strict=True)
        ]
        found = zip(
            places,
            trajectory[begins].tolist(),
            epoch[begins].tolist(),
            offset[begins].tolist(),
            num_tokens,
            usual[begins].tolist(),
            turn[begins].tolist(),
            versions,
            # What is not usual may have any version, also one that this overflows with: nobody reads it there.
            np.add.reduceat(version * tokens, begins).tolist(),
            np.maximum.reduceat(largest, begins).tolist(),
            (np.maximum.reduceat(state_bytes, begins) > 0).tolist(),
            (done[lasts] > 0).tolist(),
            strict=True,
        )
        return sorted(map(Stretch._make, found), key=_first_place)

    def alone(self, place: int) -> Stretch:
        """One chunk by itself, as one of any kind."""
        trajectory_id, epoch, offset, num_tokens, *_ = self.rows[place]
        return Stretch((place,), trajectory_id, epoch, offset, num_tokens, is_usual=False)

    def _usual(self) -> tuple[np.ndarray[Any, Any], ...]:
        """By chunk: whether it is more tokens of one action, by one version, with nothing else, and its values are possible;
        its turn, its version, its largest token id. What is not usual is known from ``chunk`` alone.
        """
        columns, token_ids, logprobs = (self._arrays[name] for name in ("chunks", "token_ids", "logprobs"))
        starts = self._ends - columns[:, TOKENS : STATE + 1]
        tokens, (segments, runs) = columns[:, TOKENS], (starts[:, column - TOKENS] for column in (SEGMENTS, RUNS))
        kind, turn, sequence, in_segment = self._arrays["segments"][segments].T
        version, in_run = self._arrays["version_runs"][runs].T
        # A NaN fails both comparisons.
        possible = (logprobs >= limits.MIN_LOGPROB) & (logprobs <= MAX_LOGPROB) & (token_ids >= 0)
        usual = (
            (columns[:, SEGMENTS] == 1) & (columns[:, RUNS] == 1) & (columns[:, REWARDS] == 0)
            & (kind == ACTION) & (sequence == 0) & (turn >= 0) & (turn <= limits.MAX_TURNS)
            & (in_segment == tokens) & (in_run == tokens) & (version >= 1) & (version <= limits.MAX_VERSION)
            & np.logical_and.reduceat(possible, starts[:, 0]) & self._has_simple_state(columns[:, STATE], starts[:, -1])
        )  # fmt: skip
        return usual, turn, version, np.maximum.reduceat(token_ids, starts[:, 0])

    def _has_simple_state(self, num_bytes: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Whether nothing can be wrong with a chunk's state: it has none, or an empty one."""
        states = np.append(self._arrays["states"], np.uint8(0))
        simple: np.ndarray[Any, Any] = (num_bytes == 0) | ((num_bytes == 1) & (states[starts] == EMPTY_STATE[0]))
        return simple

    def chunk(self, place: int) -> tuple[Chunk, dict[str, np.ndarray[Any, Any]]]:
        """A chunk as a message of its own, checked as one.

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
        chunk.check_arrays(arrays)
        return chunk, arrays

    def pieces(self, place: int) -> "RawPieces":
        """What a chunk consists of besides tokens, as it came."""
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
        size = self._arrays[name].itemsize
        return [
            data[size * (end[0] - row[TOKENS]) : size * end[0]] for row, end in zip(self.rows, self._bounds, strict=True)
        ]


_PIECES: Final = (SEGMENTS, RUNS, REWARDS)


def _first_place(stretch: Stretch) -> int:
    return stretch.places[0]


def _cut(order: np.ndarray[Any, Any], begins: np.ndarray[Any, Any], lasts: np.ndarray[Any, Any]) -> list[list[int]]:
    places: list[int] = order.tolist()
    return [places[first : last + 1] for first, last in zip(begins.tolist(), lasts.tolist(), strict=True)]


def _merged(versions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of the same version as one."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in versions:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return merged


class RawPieces(NamedTuple):
    """Rows as they came: [kind, turn, sequence, tokens], [version, tokens], and rewards."""

    segments: list[list[int]]
    version_runs: list[list[int]]
    turn_rewards: list[float]


def _segment(index: int, kind: int, turn: int, sequence: int, num_tokens: int) -> list[Any]:
    """A segment as it travels in a header. Raises: ValueError for a kind that does not exist."""
    if not 0 <= kind < len(KINDS):
        raise ValueError(f"segments[{index}] has kind {kind}: expected 0 to {len(KINDS) - 1}")
    return [KINDS[kind], turn, num_tokens, sequence]
