"""What neighbouring releases say to each other, and that each can read it."""

from typing import Any

import msgspec
import pytest

from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Message, Refused, Welcome
from gspo_protocol.releases import other_release
from tests.support.wire import neighbour

HANDSHAKE: list[Message] = [
    Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer="rollout-0", session="s", first_seq=1, fingerprint="f"),
    Welcome(protocol_version=PROTOCOL_VERSION, run_id="r", policy_version=3, weights_endpoint="e", session="s"),
    Refused(reason="no", message_type="hello", fatal=True, retry_s=1.0, session="s", protocol_version=PROTOCOL_VERSION),
]


def plain(message: Message) -> dict[str, Any]:
    """The fields, as they travel."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return fields


@pytest.mark.parametrize("message", HANDSHAKE, ids=lambda message: type(message).__name__)
def test_a_neighbouring_release_reads_our_handshake(message: Message) -> None:
    assert neighbour.read([bytes(frame) for frame in encode(message)]) == plain(message)


@pytest.mark.parametrize("message", HANDSHAKE, ids=lambda message: type(message).__name__)
def test_we_read_the_handshake_of_a_release_that_knows_more(message: Message) -> None:
    fields = plain(message)
    assert decode(neighbour.said(fields.pop("type"), **fields, regions=["paris"])).message == message


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize(("role", "own_role"), [
    ("rollout", "broker"), ("learner", "broker"), ("operator", "broker"), ("rollout", "learner"), ("rollout", "rollout"),
])  # fmt: skip
def test_a_refusal_names_both_versions_the_older_process_and_the_order(role: str, own_role: str, version: int) -> None:
    hello = decode(neighbour.hello(role, f"{role}-7", version)).message
    assert isinstance(hello, Hello)
    older = f"the {role} {role}-7" if version == 1 else f"this {own_role}"
    assert other_release(hello, own_role, own_version=2) == Refused(
        reason=f"hello: protocol_version is {version}, this {own_role} speaks 2: {older} is of the older release, update "
        "it. All processes of a run have one release: update in the order broker, learner, rollouts",
        message_type="hello",
        fatal=True,
        protocol_version=2,
    )
