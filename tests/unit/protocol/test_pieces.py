"""Segments, version runs and turn rewards as arrays: batches of long episodes fit their messages."""

from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Batch, BatchItem, Chunk, Segment, VersionRun
from protocol.messages.journal import journal_array
from protocol.messages.pieces import Pieces, piece_arrays, pieces_in
from tests.support.builders import a_batch, a_chunk, a_lease, batch_arrays, lease_arrays, token_arrays

BYTES_PER_ROW = {"segments": 12, "version_runs": 16, "turn_rewards": 8}


def longest(turns: int) -> Pieces:
    """A trajectory of single tokens: as many segments and runs as its turns may have."""
    lengths = [("observation", 1), ("action", 3)]
    return Pieces(
        [Segment(kind, turn, num) for turn in range(turns) for kind, num in lengths],  # type: ignore[arg-type]
        [VersionRun(version, 1) for turn in range(turns) for version in (-1, 2**32 - 2, 2**32 - 1, 2**32)],
        [0.1] * turns,
    )


def test_a_batch_of_thousands_of_short_turns_fits_its_message() -> None:
    turns = limits.MAX_TURNS
    pieces = longest(turns)
    item = BatchItem(2**53, 2**53, 4 * turns, 2 * turns, 4 * turns, turns, "length")
    items = [item] * (limits.TURNS_PER_BATCH // turns)
    num_tokens = sum(item.num_tokens for item in items)
    batch = Batch(index=0, policy_version=2**32, temperature=1.0, items=items)
    arrays = {
        "token_ids": np.zeros(num_tokens, np.int32),
        "logprobs": np.zeros(num_tokens, np.float32),
        **piece_arrays([pieces] * len(items)),
    }
    frames = encode(batch, arrays)
    assert len(frames[0]) < limits.MAX_HEADER_BYTES
    received = decode(frames)
    assert isinstance(received.message, Batch)
    *_, (item, parts) = received.message.split(received.arrays)
    assert item == items[-1]
    assert pieces_in(parts) == pieces


@given(st.integers(1, limits.MAX_TRAJECTORIES_PER_BATCH))
def test_the_limits_of_a_trajectory_leave_room_for_any_batch(num_trajectories: int) -> None:
    most = limits.trajectory_limits(num_trajectories)
    assert most.turns >= 16
    rows = dict(zip(BYTES_PER_ROW, (most.segments, most.runs, most.turns), strict=True))
    sizes = [num_trajectories * rows[name] * num_bytes for name, num_bytes in BYTES_PER_ROW.items()]
    assert max(sizes) <= limits.MAX_FRAME_BYTES
    tokens = 2 * limits.MAX_FRAME_BYTES
    assert sum(sizes) + tokens + limits.MAX_LARGE_HEADER_BYTES <= limits.MAX_MESSAGE_BYTES


def test_the_items_of_the_largest_batch_fit_its_header() -> None:
    item = BatchItem(2**53, 2**53, 2**24, 2**13, 2**14, 2**12, "length")
    header = msgpack.packb([msgspec.to_builtins(item)] * limits.MAX_TRAJECTORIES_PER_BATCH)
    assert len(header) < limits.MAX_LARGE_HEADER_BYTES // 4


def test_a_chunk_and_a_lease_at_their_limits_fit_their_headers() -> None:
    state = {"text": "x" * (limits.MAX_STATE_BYTES - 16)}
    turns = limits.MAX_TURNS
    pieces = longest(turns)
    chunk = Chunk(
        trajectory_id=2**53, epoch=2**53, offset=2**53, num_tokens=4 * turns, segments=list(pieces.segments),
        version_runs=list(pieces.version_runs), state=state, turn_rewards=list(pieces.turn_rewards),
    )  # fmt: skip
    tokens = {name: array[: 4 * turns] for name, array in token_arrays(4 * turns).items()}
    assert decode(encode(chunk, tokens)).message == chunk
    lease = a_lease(num_tokens=4 * turns, state=state, task={"text": "x" * (limits.MAX_TASK_BYTES - 16)})
    assert decode(encode(lease, {**tokens, **piece_arrays([pieces]), **journal_array(())})).message == lease


def test_a_state_or_a_task_that_leaves_no_room_for_the_other_is_refused() -> None:
    state, task = ({"text": "x" * size} for size in (limits.MAX_STATE_BYTES, limits.MAX_TASK_BYTES))
    with pytest.raises(ProtocolError, match=r"chunk: state has 2621.. bytes, 262144 allowed"):
        decode(encode(a_chunk(state=state), token_arrays(5)))
    with pytest.raises(ProtocolError, match=r"lease: task has 5242.. bytes, 524288 allowed"):
        decode(encode(a_lease(task=task), lease_arrays()))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("segments", lambda array: array[:-1], "array segments covers"),
        ("segments", lambda array: array[:, :2].copy(), "array segments has shape"),
        ("segments", lambda array: np.where(array == 1, 9, array), "a kind, a turn or a sequence that|covers"),
        ("version_runs", lambda array: array[:-1], "array version_runs covers"),
        ("version_runs", lambda array: array - [[5, 0]], "a version below -1"),
        ("turn_rewards", lambda array: array + np.inf, "not a list of finite numbers"),
        ("turn_rewards", lambda array: np.append(array, 0.0), "array turn_rewards has 3 rows, the items 2"),
    ],
)
def test_pieces_that_contradict_the_tokens_are_named(name: str, change: Any, words: str) -> None:
    arrays = batch_arrays()
    arrays[name] = change(arrays[name]).astype(arrays[name].dtype)
    with pytest.raises(ProtocolError, match=words):
        decode(encode(a_batch(), arrays))
