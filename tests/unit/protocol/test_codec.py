"""The codec: round trips, golden frames, hostile bytes, limits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol import limits
from gspo_protocol.codec import decode, encode, message_type
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import AnyMessage, Chunk, Finish, Status
from tests.support.builders import a_chunk, a_lease, a_part, lease_arrays, one_of_each, part_arrays, token_arrays

GOLDEN = Path(__file__).parent / "golden" / "frames.json"
ROOT = Path(__file__).parents[3]
EACH = [pytest.param(message, arrays, id=message_type(message)) for message, arrays in one_of_each()]


def test_the_builders_cover_every_message_type() -> None:
    assert {type(message) for message, _ in one_of_each()} == set(get_args(AnyMessage))


@pytest.mark.parametrize(("message", "arrays"), EACH)
def test_a_message_survives_the_wire_with_its_arrays_and_sequence_number(message, arrays) -> None:
    received = decode([bytes(frame) for frame in encode(message, arrays, seq=12)])
    assert received.message == message
    assert received.seq == 12
    assert set(received.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(received.arrays[name], array)
        assert received.arrays[name].dtype == array.dtype


@pytest.mark.parametrize(("message", "arrays"), EACH)
def test_frames_are_those_of_the_recorded_protocol_version(message, arrays) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["protocol_version"] == limits.PROTOCOL_VERSION
    recorded = [bytes.fromhex(frame) for frame in golden["frames"][message_type(message)]]
    assert decode(recorded).message == message
    assert [bytes(frame) for frame in encode(message, arrays, seq=1)] == recorded


def test_arrays_are_views_of_the_frame_and_read_only() -> None:
    frame = bytearray(encode(a_chunk(), token_arrays(5))[1])
    frames = [encode(a_chunk(), token_arrays(5))[0], frame, encode(a_chunk(), token_arrays(5))[2]]
    token_ids = decode(frames).arrays["token_ids"]
    frame[0] = 77
    assert token_ids[0] == 77
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_any_bytes_are_decoded_or_refused_with_a_protocol_error(frames: list[bytes]) -> None:
    try:
        decode(frames)
    except ProtocolError as error:
        assert str(error)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from([message for message, _ in one_of_each()]), st.data())
def test_a_message_with_a_field_replaced_is_decoded_or_refused_with_its_type(message, data) -> None:
    arrays = next(arrays for other, arrays in one_of_each() if other == message)
    frames = [bytes(frame) for frame in encode(message, arrays)]
    header = msgpack.unpackb(frames[0])
    field = data.draw(st.sampled_from(sorted(header["m"])))
    header["m"][field] = data.draw(PLAIN)
    try:
        decode([msgpack.packb(header), *frames[1:]])
    except ProtocolError as error:
        assert field == "type" or message_type(message) in str(error)


def test_deeply_nested_msgpack_is_refused_and_does_not_end_the_process() -> None:
    with pytest.raises(ProtocolError):
        decode([b"\x91" * 100_000 + b"\xc0"])


def test_an_unknown_field_is_refused_by_its_name() -> None:
    header = msgpack.unpackb(
        bytes(encode(Finish(trajectory_id=1, epoch=1, num_tokens=2, reason="done", turn_rewards=[1.0]))[0])
    )
    header["m"]["bonus"] = 3
    with pytest.raises(ProtocolError, match=r"finish.*bonus"):
        decode([msgpack.packb(header)])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(reward: float) -> None:
    header = msgpack.unpackb(
        bytes(encode(Finish(trajectory_id=1, epoch=1, num_tokens=2, reason="done", turn_rewards=[1.0]))[0])
    )
    header["m"]["turn_rewards"] = [0.0, reward]
    with pytest.raises(ProtocolError, match=r"turn_rewards\[1\]"):
        decode([msgpack.packb(header)])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_a_value_that_is_no_logprob_is_refused_with_its_place(value: float) -> None:
    arrays = token_arrays(5)
    arrays["logprobs"][3] = value
    with pytest.raises(ProtocolError, match=r"logprobs\[3\]"):
        decode(encode(a_chunk(), arrays))


def test_segments_that_do_not_cover_the_tokens_are_refused() -> None:
    frames = encode(a_chunk(), token_arrays(5))
    header = msgpack.unpackb(bytes(frames[0]))
    header["m"]["num_tokens"] = 6
    with pytest.raises(ProtocolError, match="segments cover 5 tokens, num_tokens is 6"):
        decode([msgpack.packb(header), *frames[1:]])


def test_arrays_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"token_ids has shape \(4,\), num_tokens is 5"):
        decode(encode(a_lease(), lease_arrays() | token_arrays(4)))


def test_a_frame_that_does_not_fit_its_shape_is_refused() -> None:
    frames = encode(a_part(), part_arrays())
    with pytest.raises(ProtocolError, match=r"token_ids of shape \[10\].*does not fit 39 bytes"):
        decode([frames[0], bytes(frames[1])[:-1], *frames[2:]])


def test_a_missing_frame_is_refused() -> None:
    frames = encode(a_chunk(), token_arrays(5))
    with pytest.raises(ProtocolError, match=r"in 1 frames, \['token_ids', 'logprobs'\] expected"):
        decode(frames[:2])


def test_a_header_over_the_largest_limit_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="MAX_LARGE_HEADER_BYTES"):
        decode([bytes(limits.MAX_LARGE_HEADER_BYTES + 1)])


def test_a_state_that_is_too_large_is_refused_on_both_ends_with_the_message_type() -> None:
    large = a_chunk(state={"memory": "x" * limits.MAX_HEADER_BYTES})
    with pytest.raises(ProtocolError, match=r"chunk: header has \d+ bytes.*MAX_HEADER_BYTES"):
        encode(large, token_arrays(5))
    frames = encode(a_chunk(), token_arrays(5))
    header = msgpack.unpackb(bytes(frames[0]))
    header["m"]["state"] = {"memory": "x" * limits.MAX_HEADER_BYTES}
    with pytest.raises(ProtocolError, match="chunk: header has"):
        decode([msgpack.packb(header), *frames[1:]])


def test_a_run_status_may_be_large() -> None:
    status = Status(status={"text": "x" * limits.MAX_HEADER_BYTES})
    assert decode(encode(status)).message == status


def test_more_frames_than_allowed_are_refused() -> None:
    with pytest.raises(ProtocolError, match="MAX_FRAMES"):
        decode([b""] * (limits.MAX_FRAMES + 1))


def test_encoding_without_the_arrays_is_the_callers_error() -> None:
    with pytest.raises(ProtocolError, match=r"arrays \[\] given"):
        encode(a_chunk())


def test_encoding_an_array_of_another_dtype_is_the_callers_error() -> None:
    arrays = token_arrays(5)
    arrays["token_ids"] = arrays["token_ids"].astype(np.int64)
    with pytest.raises(ProtocolError, match="dtype int64, int32 expected"):
        encode(a_chunk(), arrays)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**32, 2**32, 0], [0, 2**40, 2**40]])
def test_an_empty_array_with_an_impossible_size_is_refused(shape: list[int]) -> None:
    header = {"m": {"type": "weight_chunk", "policy_version": 1, "chunk": 0}, "s": None, "a": [["data", "uint8", shape]]}
    with pytest.raises(ProtocolError, match="weight_chunk: array data has shape"):
        decode([msgpack.packb(header), b""])


def deep(levels: int) -> object:
    node: object = 1
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": b"x"}, "state holds a bytes"),
        ({"a": [{b"k": 1}]}, "state holds a key of type bytes"),
        ({"a": msgpack.Timestamp(1)}, "state holds a Timestamp"),
        ({"a": msgpack.ExtType(5, b"x")}, "extension type 5"),
        ({"a": deep(limits.MAX_PLAIN_DEPTH)}, "MAX_PLAIN_DEPTH"),
        ({"a": deep(990)}, "MAX_PLAIN_DEPTH"),
    ],
)
def test_a_state_that_could_not_be_sent_on_is_refused(state: object, reason: str) -> None:
    header, *arrays = encode(a_chunk(), token_arrays(5), seq=1)
    plain = msgpack.unpackb(header)
    plain["m"]["state"] = state
    with pytest.raises(ProtocolError, match=reason):
        decode([msgpack.packb(plain), *arrays])


def test_a_state_may_be_as_deep_as_the_limit_says() -> None:
    state = {"a": deep(limits.MAX_PLAIN_DEPTH - 1)}
    received = decode(encode(a_chunk(state=state), token_arrays(5), seq=1))
    assert isinstance(received.message, Chunk)
    assert received.message.state == state


FIRST_MESSAGE = """
import sys
from gspo_protocol.codec import decode, encode
from gspo_protocol.messages import Ack

frames, called = encode(Ack(next_seq=3)), set()
sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
decode(frames)
sys.setprofile(None)
assert "_header" in called
sys.exit("get_class_annotations" in called)
"""


def test_the_first_message_of_a_process_finds_all_types_prepared() -> None:
    """msgspec crashes when two threads make it inspect one type for the first time, which this function does."""
    assert subprocess.run([sys.executable, "-c", FIRST_MESSAGE], cwd=ROOT, timeout=60, check=False).returncode == 0
