"""Peers that the broker talks to: bad ones, strangers, operators, over bare connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.codec import decode, encode
from gspo_protocol.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION
from gspo_protocol.messages import Ack, Heartbeat, Hello, Published, Refused, Status, StatusRequest, StopRequest, Welcome
from gspo_services.shared.net.channel import DealerChannel
from tests.support.broker.batch_rows import RUN_TIMEOUT_S
from tests.support.broker.peers import ScriptedLearner
from tests.support.broker.process import BrokerProcess, broker_process
from tests.support.wire.secured import without_commit


@contextlib.asynccontextmanager
async def dealer(
    context: zmq.asyncio.Context, broker: BrokerProcess, identity: str = "stranger", batch: bool = False
) -> AsyncIterator[DealerChannel]:
    """A bare connection, without the manners of a PeerClient."""
    endpoint = broker.batch_endpoint if batch else broker.work_endpoint
    channel = DealerChannel(context, BATCH if batch else WORK, endpoint, identity)
    try:
        yield channel
    finally:
        channel.close()


async def answer(channel: DealerChannel) -> object:
    """The next message."""
    async with asyncio.timeout(RUN_TIMEOUT_S):
        incoming = await channel.receive()
    assert incoming.received is not None, incoming.error
    return incoming.received.message


def hello(role: str = "rollout", version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol_version=version, role=role, peer="stranger", session="s")  # type: ignore[arg-type]


async def test_bad_peers_are_answered_and_the_broker_keeps_serving(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        raw = context.socket(zmq.DEALER)
        raw.connect(broker.work_endpoint)
        try:
            for garbage in ([b""], [b"\xc1"], [b"x" * 1000], [b"\x81\xa1m\x80"], [b"a"] * 100):
                await raw.send_multipart(garbage)
                async with asyncio.timeout(RUN_TIMEOUT_S):
                    refused = decode(await raw.recv_multipart()).message
                assert isinstance(refused, Refused)
                assert not refused.fatal
            await raw.send(bytes(MAX_FRAME_BYTES + 1))  # libzmq closes the connection of a peer that sends this
            await raw.send_multipart(encode(hello()))
            async with asyncio.timeout(RUN_TIMEOUT_S):
                assert isinstance(decode(await raw.recv_multipart()).message, Welcome | Refused)
        finally:
            raw.close(linger=0)
        async with dealer(context, broker, "early") as channel:
            await channel.send(Heartbeat(policy_version=0, status="starting", leases=[]))
            refused = await answer(channel)
            assert isinstance(refused, Refused)
            assert (refused.reason, refused.message_type) == ("unknown session: say hello", "heartbeat")
            await channel.send(hello(version=PROTOCOL_VERSION + 1))
            refused = await answer(channel)
            assert isinstance(refused, Refused)
            assert refused.fatal
            assert f"protocol_version is {PROTOCOL_VERSION + 1}" in refused.reason
            await channel.send(hello(role="learner"))
            refused = await answer(channel)
            assert isinstance(refused, Refused)
            assert refused.fatal
            assert "does not belong on the work channel" in refused.reason
            await channel.send(hello())
            assert isinstance(await answer(channel), Welcome)
        _, metrics = await broker.http("/metrics")
        assert 'gspo_broker_refused_total{reason="undecodable",type=""} 5.0' in metrics
        assert await broker.terminate() == 0


async def test_every_answer_of_a_session_names_it(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        async with dealer(context, broker, "learner", batch=True) as channel:
            await channel.send(Hello(protocol_version=PROTOCOL_VERSION, role="learner", peer="learner", session="life 7"))
            assert (await answer(channel)).session == "life 7"  # type: ignore[attr-defined]
            published = Published(
                policy_version=1, endpoint="tcp://w:1", digest="d", num_bytes=1, trained_batches=0, vocabulary=9
            )
            await channel.send(published, seq=0)
            assert without_commit(await answer(channel)) == Ack(next_seq=1, session="life 7")
            await channel.send(msgspec.structs.replace(published, digest="other"), seq=1)
            refused = await answer(channel)
            assert isinstance(refused, Refused)
            assert (refused.fatal, refused.session) == (True, "life 7")


async def test_a_refusal_for_good_is_always_heard(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        # More than a second: several of the broker's ticks fall into it. One connection may not say Hello that often.
        for number in range(6):
            async with dealer(context, broker, f"stranger-{number}") as channel:
                for _ in range(25):
                    await channel.send(hello(version=PROTOCOL_VERSION + 1))
                    refused = await answer(channel)
                    assert isinstance(refused, Refused)
                    assert refused.fatal


async def test_an_operator_watches_and_stops_the_run(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        learner = ScriptedLearner(context, broker.batch_endpoint, "s")
        async with asyncio.timeout(RUN_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(learner.run())
            async with dealer(context, broker, batch=True) as channel:
                await channel.send(hello(role="operator"))
                assert isinstance(await answer(channel), Welcome)
                await broker.logged("version_published")
                await channel.send(StatusRequest())
                status = await answer(channel)
                assert isinstance(status, Status)
                assert status.status["policy_version"] == 1
                assert status.status["waiting_for"].startswith("2 more complete groups: 0 of 2 are ready")
                await channel.send(StopRequest(reason="seen enough"))
        assert learner.end is not None
        assert learner.end.reason == "stopped by stranger: seen enough"
