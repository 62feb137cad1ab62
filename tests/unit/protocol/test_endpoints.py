"""Announced endpoints: whatever is taken can be connected to, and what cannot is refused with the reason."""

import re

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.endpoints import MAX_HOST_CHARS, MAX_PATH_BYTES, require_endpoint

ALMOST = st.text("tcpi:/[]%.-_*@ 0a1f9\n\x00é", max_size=24)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:7003", "tcp://learner:1", "tcp://learner-0.learner.gspo.svc.cluster.local:65535",
        "tcp://[::1]:7003", "tcp://[fe80::1%eth0]:7003", "ipc:///tmp/weights", "ipc://@weights",
        f"tcp://{'h' * MAX_HOST_CHARS}:1",
        f"ipc://{'p' * MAX_PATH_BYTES}",
    ],
)  # fmt: skip
def test_what_a_process_can_connect_to_is_taken(endpoint: str) -> None:
    require_endpoint("endpoint", endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "", "tcp://", "tcp://learner", "tcp://learner:", "tcp://:7003", "tcp://learner:*", "tcp://*:7003", "tcp://learner:0",
        "tcp://learner:65536", "tcp://learner:7003/x", "tcp://own;learner:7003", "tcp://[::1:7003", "tcp://le arner:7003",
        "tcp://learner:7003\n", "tcp://learner:\u0667", "udp://learner:7003", "inproc://weights", "http://learner:7003",
        "ipc://", "ipc:///tmp/a b", "ipc:///tmp/\x1b[2J",
        f"tcp://{'h' * (MAX_HOST_CHARS + 1)}:1", f"ipc://{'p' * (MAX_PATH_BYTES + 1)}",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_field_and_the_value(endpoint: str) -> None:
    with pytest.raises(ValueError, match=re.escape("endpoint is '")) as refused:
        require_endpoint("endpoint", endpoint)
    assert "expected tcp://HOST:PORT" in str(refused.value)
    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


@given(
    st.one_of(
        ALMOST,
        ALMOST.map("tcp://{}:7".format),
        ALMOST.map("ipc://{}".format),
        st.from_regex(r"tcp://[0-9A-Za-z._\[\]:%-]{1,12}:[0-9]{1,6}", fullmatch=True),
    )
)
def test_libzmq_connects_to_whatever_is_taken(endpoint: str) -> None:
    try:
        require_endpoint("endpoint", endpoint)
    except ValueError:
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
