"""Segments, version runs and turn rewards as arrays: batches of long episodes fit their messages."""

from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol import limits
from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Batch, BatchItem, Chunk, Segment, VersionRun
from gspo_protocol.messages.journal import journal_array
from gspo_protocol.messages.pieces import SPAN_ARRAYS, Pieces, check_pieces, piece_arrays
from tests.support.builders import a_batch, a_chunk, a_lease, a_part, batch_arrays, lease_arrays, part_arrays, token_arrays


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
    item = BatchItem(2**53, 2**53, 4 * turns, limits.MAX_SEQUENCES, turns, 2**32, "length", 0.7, 2**53)
    items = [item] * (limits.TURNS_PER_BATCH // turns)
    batch = Batch(index=0, policy_version=2**32, part_tokens=limits.MAX_PART_TOKENS, items=items)
    arrays = {
        "turn_rewards": np.full(turns * len(items), 0.1),
        "sequences": np.full((limits.MAX_SEQUENCES * len(items), 2), 2**31 - 1, np.int32),
    }
    frames = encode(batch, arrays)
    assert len(frames[0]) < limits.MAX_HEADER_BYTES
    received = decode(frames)
    assert isinstance(received.message, Batch)
    *_, (item, rewards, sequences) = received.message.split(received.arrays)
    assert (item, len(rewards), len(sequences)) == (items[-1], turns, limits.MAX_SEQUENCES)


def test_a_part_of_single_tokens_fits_its_message() -> None:
    pieces = longest(limits.MAX_TURNS)
    spans = piece_arrays([pieces] * (limits.MAX_PART_TOKENS // (4 * limits.MAX_TURNS)))
    arrays = {
        "token_ids": np.zeros(limits.MAX_PART_TOKENS, np.int32),
        "logprobs": np.zeros(limits.MAX_PART_TOKENS, np.float32),
        **{name: spans[name] for name in SPAN_ARRAYS},
    }
    assert decode(encode(a_part(), arrays)).message == a_part()
    arrays = {name: np.concatenate([array, array[:1]]) for name, array in arrays.items()}
    with pytest.raises(ProtocolError, match=r"batch_part: array token_ids has 1048577 tokens, .*MAX_PART_TOKENS"):
        decode(encode(a_part(), arrays))


@given(st.integers(1, limits.MAX_TRAJECTORIES_PER_BATCH))
def test_the_limits_of_a_trajectory_leave_room_for_any_batch(num_trajectories: int) -> None:
    most = limits.trajectory_limits(num_trajectories)
    assert most.turns >= 16
    rewards = 8 * most.turns * num_trajectories
    # Each sequence that is trained has a turn, or is its trajectory's only one.
    sequences = 8 * max(1, min(most.turns, limits.MAX_SEQUENCES)) * num_trajectories
    assert max(rewards, sequences) <= limits.MAX_FRAME_BYTES
    assert rewards + sequences + limits.MAX_LARGE_HEADER_BYTES <= limits.MAX_MESSAGE_BYTES


def test_the_items_of_the_largest_batch_fit_its_header() -> None:
    item = BatchItem(2**53, 2**53, 2**32, 2**8, 2**12, 2**32, "length", 0.7, 2**53)
    header = msgpack.packb([msgspec.to_builtins(item)] * limits.MAX_TRAJECTORIES_PER_BATCH)
    assert len(header) < limits.MAX_LARGE_HEADER_BYTES // 3


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


@pytest.mark.parametrize("name", [*SPAN_ARRAYS])
def test_a_lease_that_begins_covers_nothing_and_one_with_tokens_covers_all(name: str) -> None:
    none = piece_arrays([])
    check_pieces(none, 0)
    check_pieces(piece_arrays([longest(1)]), 4)
    with pytest.raises(ValueError, match=f"array {name} covers 4 tokens, num_tokens is 0"):
        check_pieces({**none, name: piece_arrays([longest(1)])[name]}, 0)
    with pytest.raises(ValueError, match="covers 0 tokens, num_tokens is 4"):
        check_pieces(none, 4)
    with pytest.raises(ValueError, match=f"array {name} has shape"):
        check_pieces({**none, name: none[name].ravel()}, 0)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("segments", lambda array: array[:-1], "array segments covers"),
        ("segments", lambda array: array[:, :2].copy(), "array segments has shape"),
        ("segments", lambda array: np.where(array == 1, 9, array), "a kind, a turn or a sequence that|covers"),
        ("version_runs", lambda array: array[:-1], "array version_runs covers"),
        ("version_runs", lambda array: array - [[5, 0]], "a version below -1"),
        ("token_ids", lambda array: array - 9, "token ids are not negative"),
        ("logprobs", lambda array: array * np.nan, "expected a log-prob"),
        ("token_ids", lambda array: array[:0], "array token_ids has 0 tokens"),
    ],
)
def test_pieces_that_contradict_the_tokens_are_named(name: str, change: Any, words: str) -> None:
    arrays = part_arrays()
    arrays[name] = change(arrays[name]).astype(arrays[name].dtype)
    with pytest.raises(ProtocolError, match=words):
        decode(encode(a_part(), arrays))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("turn_rewards", lambda array: array + np.inf, "not a list of finite numbers"),
        ("turn_rewards", lambda array: np.append(array, 0.0), "array turn_rewards has 3 rows, the items 2"),
        ("sequences", lambda array: array[:, :1].copy(), "array sequences has shape"),
        ("sequences", lambda array: array[:1], "array sequences has 1 rows, the items 2"),
        ("sequences", lambda array: array * [[0, 0]], "a sequence without tokens"),
        ("sequences", lambda array: array + np.array([[0, 3]]), "more action tokens than tokens"),
    ],
)
def test_a_batch_that_contradicts_its_items_is_named(name: str, change: Any, words: str) -> None:
    arrays = batch_arrays()
    arrays[name] = change(arrays[name]).astype(arrays[name].dtype)
    with pytest.raises(ProtocolError, match=words):
        decode(encode(a_batch(), arrays))


def test_a_batch_without_end_is_refused_before_anybody_makes_room_for_it() -> None:
    huge = [msgspec.structs.replace(item, num_tokens=limits.MAX_BATCH_TOKENS) for item in a_batch().items]
    with pytest.raises(ProtocolError, match=r"items have 8589934592 tokens, 4294967296 allowed \(MAX_BATCH_TOKENS\)"):
        decode(encode(msgspec.structs.replace(a_batch(), items=huge), batch_arrays()))
