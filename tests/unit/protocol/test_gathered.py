"""Many chunks in one message: each comes back as it was, and what is wrong with one is its own."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol import limits
from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Chunk, Segment, VersionRun
from protocol.messages.gathered import COLUMNS, OFFSET, SEGMENTS, STATE, TOKENS, Chunks, Extension, Gathered, gather
from tests.support.builders import a_chunk, an_extension, token_arrays


def read(message: Chunks, arrays: dict[str, Any]) -> Gathered:
    return Gathered(decode([bytes(frame) for frame in encode(message, arrays, seq=1)]).arrays)


def with_arrays(chunk: Chunk) -> tuple[Chunk, dict[str, Any]]:
    return chunk, token_arrays(chunk.num_tokens)


MIXED = [a_chunk(), an_extension(), a_chunk(trajectory_id=9, state=None, turn_rewards=[0.5]), an_extension(state={})]


def test_every_chunk_comes_back_with_its_tokens() -> None:
    chunks = read(*gather([with_arrays(chunk) for chunk in MIXED]))
    assert len(chunks) == len(MIXED)
    for place, sent in enumerate(MIXED):
        chunk, arrays = chunks.chunk(place)
        assert chunk == sent
        for name, array in token_arrays(sent.num_tokens).items():
            np.testing.assert_array_equal(arrays[name], array)
            assert chunks.token_bytes(name)[place] == array.tobytes()


def test_only_more_tokens_of_one_action_by_one_version_are_the_usual_chunk() -> None:
    two_runs = an_extension(version_runs=[VersionRun(3, 1), VersionRun(4, 2)])
    observation = an_extension(segments=[Segment("observation", 0, 3)], version_runs=[VersionRun(-1, 3)])
    other_sequence = an_extension(segments=[Segment("action", 0, 3, 1)])
    sent = [*MIXED, two_runs, observation, other_sequence, an_extension(turn_rewards=[1.0]), an_extension(state={"a": 1})]
    usual = Extension(turn=0, version=4, largest_token_id=7)
    assert read(*gather([with_arrays(chunk) for chunk in sent])).extensions == [
        None, usual, None, usual, None, None, None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("array", "value", "named"),
    [
        ("token_ids", -1, "token_ids holds -1"),
        ("logprobs", np.nan, r"logprobs\[0\] is nan"),
        ("logprobs", 0.5, r"logprobs\[0\] is 0.5"),
        ("segments", 7, r"segments\[0\] has kind 7"),
        ("version_runs", -2, "-1"),
    ],
)
def test_a_value_that_cannot_be_is_the_fault_of_one_chunk(array: str, value: float, named: str) -> None:
    message, arrays = gather([with_arrays(an_extension(trajectory_id=number)) for number in range(3)])
    first = {"segments": 1, "version_runs": 1}.get(array, 3)
    arrays[array].reshape(len(arrays[array]), -1)[first, 0] = value
    chunks = read(message, arrays)
    assert [extension is None for extension in chunks.extensions] == [False, True, False]
    with pytest.raises(ValueError, match=named):
        chunks.chunk(1)
    assert [chunks.chunk(place)[0].trajectory_id for place in (0, 2)] == [0, 2]


def test_a_state_that_is_no_plain_map_is_the_fault_of_one_chunk() -> None:
    for packed, named in ((b"\xc1", "not msgpack"), (msgpack.packb({"a": b"x"}), "bytes"), (b"\x01", "state")):
        message, arrays = gather([with_arrays(an_extension()), with_arrays(an_extension())])
        arrays["states"] = np.frombuffer(packed, np.uint8)
        arrays["chunks"][0, STATE] = len(packed)
        chunks = read(message, arrays)
        assert chunks.extensions[0] is None
        with pytest.raises(ValueError, match=named):
            chunks.chunk(0)
        assert chunks.chunk(1)[0] == an_extension()


def test_what_is_seen_of_all_at_once_agrees_with_a_look_at_each() -> None:
    """Whatever numbers come: the usual chunk is one that may be a Chunk, and is what it says."""
    rng = random.Random(1)
    usual = 0
    for _ in range(300):
        message, arrays = gather([with_arrays(rng.choice(MIXED)) for _ in range(rng.randint(1, 4))])
        arrays = {name: array.copy() for name, array in arrays.items()}
        name = rng.choice(["segments", "version_runs", "token_ids", "logprobs", "turn_rewards"])
        if len(arrays[name]):
            flat = arrays[name].reshape(-1)
            flat[rng.randrange(len(flat))] = rng.choice([-1, 0, 1, 3, 2**31 - 1])
        chunks = read(message, arrays)
        for place, extension in enumerate(chunks.extensions):
            if extension is None:
                continue
            usual += 1
            chunk, found = chunks.chunk(place)
            assert chunk.segments == [Segment("action", extension.turn, chunk.num_tokens)]
            assert chunk.version_runs == [VersionRun(extension.version, chunk.num_tokens)]
            assert found["token_ids"].max() == extension.largest_token_id
    assert usual > 100


@pytest.mark.parametrize(
    ("column", "value", "named"),
    [
        (TOKENS, 4, "array token_ids has shape"),
        (TOKENS, 0, r"chunks\[1\] has num_tokens 0"),
        (OFFSET, -1, r"chunks\[1\] has offset -1"),
        (SEGMENTS, 2, "array segments has shape"),
        (SEGMENTS, limits.MAX_SEGMENTS, "MAX_SEGMENTS"),
        (TOKENS, limits.MAX_GATHERED_TOKENS, "MAX_GATHERED_TOKENS"),
        (STATE, limits.MAX_STATE_BYTES + 1, "MAX_STATE_BYTES"),
        (len(COLUMNS) - 1, 2, "turn_done 2"),
    ],
)
def test_columns_that_do_not_say_which_bytes_are_whose_are_no_message(column: int, value: int, named: str) -> None:
    message, arrays = gather([with_arrays(an_extension()), with_arrays(an_extension())])
    arrays["chunks"][1, column] = value
    with pytest.raises(ProtocolError, match=f"chunks: .*{named}"):
        read(message, arrays)


def test_the_number_of_chunks_is_bounded_and_is_that_of_the_rows() -> None:
    message, arrays = gather([with_arrays(an_extension())] * (limits.MAX_CHUNKS_PER_MESSAGE + 1))
    with pytest.raises(ProtocolError, match="num_chunks"):
        read(message, arrays)
    with pytest.raises(ProtocolError, match="array chunks has shape"):
        read(Chunks(num_chunks=2), arrays)


def test_the_largest_message_fits_the_room_that_every_rollout_has() -> None:
    """A rollout's connection takes MAX_HEADER_BYTES besides the tokens of its longest chunk."""
    most = (
        8 * limits.MAX_GATHERED_TOKENS + 8 * len(COLUMNS) * limits.MAX_CHUNKS_PER_MESSAGE + 16 * limits.MAX_SEGMENTS
        + 16 * limits.MAX_RUNS + 8 * limits.MAX_TURNS + limits.MAX_STATE_BYTES
    )  # fmt: skip
    assert most + 4096 < limits.MAX_HEADER_BYTES
