"""Many chunks in one message: each comes back as it was, and what is wrong with one is its own."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest

from gspo_protocol import limits
from gspo_protocol.codec import decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Chunk, Segment, VersionRun
from gspo_protocol.messages.gathered import COLUMNS, OFFSET, SEGMENTS, STATE, TOKENS, Chunks, Gathered, gather
from gspo_protocol.messages.stretches import Stretch
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


def usual_places(chunks: Gathered) -> list[int]:
    return sorted(place for stretch in chunks.stretches if stretch.is_usual for place in stretch.places)


def test_only_more_tokens_of_one_action_by_one_version_are_the_usual_chunk() -> None:
    two_runs = an_extension(version_runs=[VersionRun(3, 1), VersionRun(4, 2)])
    observation = an_extension(segments=[Segment("observation", 0, 3)], version_runs=[VersionRun(-1, 3)])
    other_sequence = an_extension(segments=[Segment("action", 0, 3, 1)])
    sent = [*MIXED, two_runs, observation, other_sequence, an_extension(turn_rewards=[1.0]), an_extension(state={"a": 1})]
    chunks = read(*gather([with_arrays(chunk) for chunk in sent]))
    assert usual_places(chunks) == [1, 3]
    first = an_extension()
    assert next(stretch for stretch in chunks.stretches if 1 in stretch.places) == Stretch(
        (1,), first.trajectory_id, first.epoch, first.offset, 3, is_usual=True, turn=0, versions=((4, 3),), version_sum=12,
        largest_token_id=7,
    )  # fmt: skip


def goes_on(place: int, offset: int, version: int = 4, **fields: Any) -> Chunk:
    """A usual chunk of trajectory ``place``, of three tokens."""
    return an_extension(trajectory_id=place, offset=offset, version_runs=[VersionRun(version, 3)], **fields)


def test_chunks_that_follow_one_another_are_one_stretch_whatever_is_between_them() -> None:
    sent = [
        goes_on(1, 10), goes_on(2, 10, turn_done=True), goes_on(1, 13, state={}), goes_on(1, 16, 6), goes_on(2, 13, 5),
        goes_on(1, 19, 6, turn_done=True),
    ]  # fmt: skip
    one, two = read(*gather([with_arrays(chunk) for chunk in sent])).stretches
    assert (one.places, one.trajectory_id, one.offset, one.num_tokens) == ((0, 2, 3, 5), 1, 10, 12)
    assert list(one.versions) == [(4, 6), (6, 6)]
    assert (one.version_sum, one.has_state, one.turn_done) == (4 * 6 + 6 * 6, True, True)
    assert (two.places, list(two.versions), two.has_state, two.turn_done) == ((1, 4), [(4, 3), (5, 3)], False, False)


def test_stretches_as_arrays_say_the_same() -> None:
    sent = [
        goes_on(5, 10), a_chunk(trajectory_id=1), goes_on(2, 10), goes_on(1, 13), goes_on(3, 4), goes_on(2, 13, 6),
        goes_on(3, 7, 3), goes_on(2, 20),
    ]  # fmt: skip
    chunks = read(*gather([with_arrays(chunk) for chunk in sent]))
    columns = chunks.stretch_columns
    assert columns.trajectory_id.tolist() == [5, 1, 2, 1, 3, 3, 2]
    assert columns.is_only.tolist() == [True, False, False, False, False, False, False]
    for place, stretch in enumerate(chunks.stretches):
        names = ["trajectory_id", "epoch", "offset", "num_tokens", "is_usual"]
        if stretch.is_usual:
            names += ["turn", "version_sum", "largest_token_id"]
            found = (columns.oldest[place], columns.newest[place], columns.num_versions[place])
            assert found == (stretch.versions[0][0], stretch.versions[-1][0], len(stretch.versions))
        assert [getattr(columns, name)[place] for name in names] == [getattr(stretch, name) for name in names]
    alone = columns.only(2)
    assert (alone.offset.tolist(), alone.num_versions.tolist(), alone.is_only.tolist()) == ([10], [2], [True])


@pytest.mark.parametrize(
    "second",
    [
        goes_on(1, 12),
        goes_on(1, 14),
        goes_on(1, 13, epoch=9),
        goes_on(2, 13),
        goes_on(1, 13, 3),
        goes_on(1, 13, segments=[Segment("action", 1, 3)]),
        goes_on(1, 13, turn_rewards=[1.0]),
    ],
    ids=["overlap", "gap", "epoch", "trajectory", "version goes back", "next turn", "reward"],
)
def test_what_does_not_go_on_is_a_stretch_of_its_own(second: Chunk) -> None:
    stretches = read(*gather([with_arrays(goes_on(1, 10)), with_arrays(second)])).stretches
    assert [list(stretch.places) for stretch in stretches] == [[0], [1]]


def test_a_stretch_does_not_reach_over_another_kind_of_chunk_of_its_trajectory() -> None:
    sent = [goes_on(1, 10), a_chunk(trajectory_id=1), goes_on(1, 13)]
    stretches = read(*gather([with_arrays(chunk) for chunk in sent])).stretches
    assert [(list(stretch.places), stretch.is_usual) for stretch in stretches] == [([0], True), ([1], False), ([2], True)]


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
    assert usual_places(chunks) == [0, 2]
    with pytest.raises(ValueError, match=named):
        chunks.chunk(1)
    assert [chunks.chunk(place)[0].trajectory_id for place in (0, 2)] == [0, 2]


def test_a_state_that_is_no_plain_map_is_the_fault_of_one_chunk() -> None:
    for packed, named in ((b"\xc1", "not msgpack"), (msgpack.packb({"a": b"x"}), "bytes"), (b"\x01", "state")):
        message, arrays = gather([with_arrays(an_extension()), with_arrays(an_extension())])
        arrays["states"] = np.frombuffer(packed, np.uint8)
        arrays["chunks"][0, STATE] = len(packed)
        chunks = read(message, arrays)
        assert usual_places(chunks) == [1]
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
        assert sorted(place for stretch in chunks.stretches for place in stretch.places) == list(range(len(chunks)))
        for stretch in chunks.stretches:
            if not stretch.is_usual:
                continue
            usual += 1
            found = [chunks.chunk(place) for place in stretch.places]
            assert all(chunk.segments == [Segment("action", stretch.turn, chunk.num_tokens)] for chunk, _ in found)
            runs = [run for chunk, _ in found for run in chunk.version_runs]
            assert sum(run.version * run.num_tokens for run in runs) == stretch.version_sum
            assert max(arrays["token_ids"].max() for _, arrays in found) == stretch.largest_token_id
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
