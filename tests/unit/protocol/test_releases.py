"""What neighbouring releases say to each other, and that each can read it."""

import msgpack
import msgspec
import pytest

from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Message, Refused, Welcome
from gspo_protocol.releases import advice, other_release
from tests.support.wire import previous

HANDSHAKE: list[Message] = [
    Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer="rollout-0", session="s", first_seq=1, fingerprint="f"),
    Welcome(protocol_version=PROTOCOL_VERSION, run_id="r", policy_version=3, weights_endpoint="e", session="s"),
    Refused(reason="no", message_type="hello", fatal=True, retry_s=1.0, session="s"),
]


def test_the_recorded_release_is_the_one_before() -> None:
    assert previous.PREVIOUS == PROTOCOL_VERSION - 1, "record the previous release's handshake in golden/previous.json"


@pytest.mark.parametrize("message", HANDSHAKE, ids=lambda message: type(message).__name__)
def test_the_previous_release_reads_our_handshake(message: Message) -> None:
    fields = previous.read([bytes(frame) for frame in encode(message)])
    assert fields["type"] == message.__struct_config__.tag


@pytest.mark.parametrize("kind", ["hello", "welcome", "refused"])
def test_we_read_the_previous_releases_handshake(kind: str) -> None:
    header = previous.recorded(kind)
    fields = msgspec.to_builtins(decode([msgpack.packb(header)]).message)
    assert {name: fields[name] for name in header["m"]} == header["m"]


@pytest.mark.parametrize("message", HANDSHAKE, ids=lambda message: type(message).__name__)
def test_a_field_of_a_later_release_is_ignored_in_a_handshake(message: Message) -> None:
    header = msgpack.unpackb(bytes(encode(message)[0]))
    header["m"]["regions"] = ["paris"]
    assert decode([msgpack.packb(header)]).message == message


def command(workload: str, role: str) -> str:
    return f"kubectl -n NAMESPACE set image {workload} {role}=IMAGE"


@pytest.mark.parametrize(
    ("role", "version", "own_role", "older", "way_out"),
    [
        ("rollout", 8, "broker", "the rollout rollout-7", f"pod rollout-7: {command('deployment/rollout', 'rollout')}"),
        ("rollout", 10, "broker", "this broker", f"pod broker-0: {command('statefulset/broker', 'broker')}"),
        ("rollout", 10, "learner", "this learner", f"pod learner-0: {command('statefulset/learner', 'learner')}"),
        ("learner", 8, "broker", "the learner rollout-7", f"pod learner-0: {command('statefulset/learner', 'learner')}"),
        ("operator", 8, "broker", "the operator rollout-7", "Run the gspo of the newer release in place of rollout-7."),
    ],
)
def test_a_refusal_names_the_pod_to_update_and_the_command(
    role: str, version: int, own_role: str, older: str, way_out: str
) -> None:
    text = other_release(role, "rollout-7", version, own_role, own_version=9)
    assert f"{older} is of the older release, update it. " in text
    assert way_out in text
    assert text.endswith("update in the order broker, learner, rollouts")
    assert advice(text, role, "rollout-7", own_role) == "", "a whole refusal is not said twice"


@pytest.mark.parametrize("other", ["broker", "learner"])
def test_a_refusal_of_the_previous_release_says_all_by_itself(other: str) -> None:
    refusal = previous.REFUSALS[other]
    assert f"this {other} is of the older release, update it. On Kubernetes this is the pod {other}-0: kubectl" in refusal
    assert advice(refusal, "rollout", "rollout-0", other) == ""


@pytest.mark.parametrize("other", ["broker", "learner"])
def test_a_refusal_of_a_release_that_named_no_pod_gets_the_pod_and_the_command(other: str) -> None:
    reason = f"protocol version 9 of rollout-0 does not match 8 of the {other}: run the same release everywhere"
    more = advice(reason, "rollout", "rollout-0", other)
    assert more.startswith(
        f": the {other} is of the older release. On Kubernetes this is the pod {other}-0: kubectl -n NAMESPACE"
    )
    assert more.endswith("Update in the order broker, learner, rollouts")


def test_an_older_process_is_told_that_it_is_the_one() -> None:
    reason = "hello: protocol_version is 8, this broker speaks 9: run the same release everywhere"
    assert advice(reason, "rollout", "rollout-0", "broker").startswith(": this rollout rollout-0 is of the older release.")


def test_other_refusals_get_no_advice_about_releases() -> None:
    assert advice("hello: a learner does not belong on the work channel", "learner", "learner", "broker") == ""
