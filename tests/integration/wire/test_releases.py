"""Peers of the previous release at this one's broker and learner, and this one's at the previous release's: real sockets."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS, WORK, ChannelSpec
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello, Refused
from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.broker.process import broker_process
from tests.support.wire import previous
from tests.support.wire.served_weights import Served
from tests.support.wire.zmq_ends import PATIENCE_S, ScriptedEnd, a_client, in_background, zmq_context


async def answered(context: zmq.asyncio.Context, endpoint: str, role: str, peer: str) -> dict[str, object]:
    """What the previous release's peer reads after its Hello."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        await socket.send_multipart(previous.hello(role, peer))
        async with asyncio.timeout(PATIENCE_S):
            return previous.read(await socket.recv_multipart())
    finally:
        socket.close(linger=0)


@pytest.mark.parametrize(("role", "pod", "workload"), [
    ("rollout", "rollout-6f9c-1", "deployment/rollout"), ("learner", "learner-0", "statefulset/learner"),
])  # fmt: skip
async def test_a_peer_of_the_previous_release_reads_and_the_broker_logs_what_to_update(
    tmp_path: Path, role: str, pod: str, workload: str
) -> None:
    peer = pod if role == "rollout" else role
    async with zmq_context() as context, broker_process(tmp_path) as broker:
        endpoint = broker.work_endpoint if role == "rollout" else broker.batch_endpoint
        refused = await answered(context, endpoint, role, peer)
        assert (refused["type"], refused["fatal"], refused["message_type"]) == ("refused", True, "hello")
        reason = str(refused["reason"])
        assert f"protocol_version is {previous.PREVIOUS}, this broker speaks {PROTOCOL_VERSION}" in reason
        assert f"this is the pod {pod}: kubectl -n NAMESPACE set image {workload} {role}=IMAGE" in reason
        assert await broker.terminate() == 0
        logged = broker.last("message_refused")
        assert (logged["reason"], logged["peer"]) == (reason, peer)


async def test_a_rollout_of_the_previous_release_is_refused_by_the_learner_too() -> None:
    async with zmq_context() as context:
        served = Served(context)
        async with in_background(served.authenticator.run(), served.server.run()):
            refused = await answered(context, served.endpoint, "rollout", "rollout-1")
        assert (refused["type"], refused["fatal"]) == ("refused", True)
        assert "this is the pod rollout-1" in str(refused["reason"])
        assert served.count("messages_refused", channel="weights") == 1


@pytest.mark.parametrize(("spec", "other"), [(WORK, "broker"), (WEIGHTS, "learner")])
async def test_a_rollout_that_the_previous_release_refuses_says_what_to_update_first(spec: ChannelSpec, other: str) -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, spec)
        client = a_client(context, spec, end.endpoint)

        async def refuse() -> None:
            await end.expect(Hello)
            await end.reply(Refused(reason=previous.REFUSALS[other], fatal=True))

        async with in_background(refuse()):
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(client.run(), PATIENCE_S)
        (error,) = flatten(raised.value)
        assert isinstance(error, ServiceError)
        assert previous.REFUSALS[other] in str(error)
        assert f"this {other} is of the older release, update it. On Kubernetes this is the pod {other}-0" in str(error)


async def test_a_peer_of_a_later_release_is_told_that_the_broker_is_older(tmp_path: Path) -> None:
    class LaterHello(Hello, frozen=True, tag="hello"):
        region: str = "paris"

    later = LaterHello(protocol_version=PROTOCOL_VERSION + 1, role="operator", peer="o", session="s")
    async with zmq_context() as context, broker_process(tmp_path) as broker:
        socket = context.socket(zmq.DEALER)
        socket.connect(broker.batch_endpoint)
        try:
            header = {"m": msgspec.to_builtins(later), "s": None, "a": []}
            await socket.send(msgspec.msgpack.encode(header))
            async with asyncio.timeout(PATIENCE_S):
                refused = previous.read(await socket.recv_multipart())
        finally:
            socket.close(linger=0)
    assert refused["fatal"]
    assert "this broker is of the older release, update it. On Kubernetes this is the pod broker-0" in refused["reason"]
