"""Peers of neighbouring releases at this one's broker and learner, and this one's at theirs: real sockets."""

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS, WORK, ChannelSpec
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Hello
from gspo_protocol.releases import other_release
from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.broker.process import broker_process
from tests.support.wire import neighbour
from tests.support.wire.served_weights import Served
from tests.support.wire.zmq_ends import PATIENCE_S, ScriptedEnd, a_client, in_background, zmq_context


async def answered(context: zmq.asyncio.Context, endpoint: str, hello: list[bytes]) -> dict[str, object]:
    """What a neighbouring release's peer reads after its Hello."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        await socket.send_multipart(hello)
        async with asyncio.timeout(PATIENCE_S):
            return neighbour.read(await socket.recv_multipart())
    finally:
        socket.close(linger=0)


@pytest.mark.parametrize(("role", "peer"), [("rollout", "rollout-6f9c-1"), ("learner", "learner")])
async def test_a_peer_of_an_older_release_reads_and_the_broker_logs_which_is_older(
    tmp_path: Path, role: str, peer: str
) -> None:
    async with zmq_context() as context, broker_process(tmp_path) as broker:
        endpoint = broker.work_endpoint if role == "rollout" else broker.batch_endpoint
        refused = await answered(context, endpoint, neighbour.hello(role, peer))
        assert (refused["type"], refused["fatal"], refused["message_type"]) == ("refused", True, "hello")
        assert refused["protocol_version"] == PROTOCOL_VERSION
        reason = str(refused["reason"])
        assert f"protocol_version is {neighbour.OLDER}, this broker speaks {PROTOCOL_VERSION}" in reason
        assert f"the {role} {peer} is of the older release, update it" in reason
        assert await broker.terminate() == 0
        logged = broker.last("message_refused")
        assert (logged["reason"], logged["peer"]) == (reason, peer)


async def test_a_rollout_of_an_older_release_is_refused_by_the_learner_too() -> None:
    async with zmq_context() as context:
        served = Served(context)
        async with in_background(served.authenticator.run(), served.server.run()):
            refused = await answered(context, served.endpoint, neighbour.hello("rollout", "rollout-1"))
        assert (refused["type"], refused["fatal"], refused["protocol_version"]) == ("refused", True, PROTOCOL_VERSION)
        assert "the rollout rollout-1 is of the older release" in str(refused["reason"])
        assert served.count("messages_refused", channel="weights") == 1


@pytest.mark.parametrize(("version", "pod"), [(neighbour.OLDER, "{other}-0"), (neighbour.NEWER, "rollout-6f9c-1")])
@pytest.mark.parametrize(("spec", "other"), [(WORK, "broker"), (WEIGHTS, "learner")])
async def test_a_rollout_that_another_release_refuses_says_which_pod_to_update_first(
    spec: ChannelSpec, other: str, version: int, pod: str
) -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, spec)
        client = a_client(context, spec, end.endpoint, name="rollout-6f9c-1")
        refusals: list[str] = []

        async def refuse() -> None:
            refusal = other_release(await end.expect(Hello), other, own_version=version)
            refusals.append(refusal.reason)
            await end.reply(refusal)

        async with in_background(refuse()):
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(client.run(), PATIENCE_S)
        (error,) = flatten(raised.value)
        assert isinstance(error, ServiceError)
        assert f"{refusals[0]}. On Kubernetes this is the pod {pod.format(other=other)}: kubectl" in str(error)


async def test_a_peer_of_a_later_release_is_told_that_the_broker_is_older(tmp_path: Path) -> None:
    later = neighbour.hello("operator", "o", neighbour.NEWER, region="paris")
    async with zmq_context() as context, broker_process(tmp_path) as broker:
        refused = await answered(context, broker.batch_endpoint, later)
    assert refused["fatal"]
    assert "this broker is of the older release, update it" in str(refused["reason"])
