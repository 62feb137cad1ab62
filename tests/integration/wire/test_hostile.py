"""A real broker under attack through its own ports: it lives, its memory stays bounded, and honest peers are served."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_protocol.messages import Heartbeat, Pulse
from gspo_services.shared.net import PeerClient
from tests.support.broker.process import BrokerProcess, broker_process, scraped
from tests.support.wire.attacks import EMPTY, LARGE, MIB, Memory, endless, flood, heartbeat, hello, in_thread
from tests.support.wire.closed_door import needs_closed_doors
from tests.support.wire.zmq_ends import a_client, in_background
from tests.support.wire.zmtp import ZmtpPeer, message

ATTACK_S = 20.0
FLOOD_S = 3.0
NUM_ANSWERS = 10


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def port(broker: BrokerProcess) -> int:
    return int(broker.work_endpoint.rpartition(":")[2])


async def logged(broker: BrokerProcess, event: str) -> dict[str, Any]:
    await broker.logged(event)
    return broker.last(event)


async def answered(client: PeerClient) -> None:
    """Wait until a heartbeat is answered."""
    await client.send(Heartbeat(policy_version=0, status="starting", leases=[]))
    async with asyncio.timeout(ATTACK_S):
        while not isinstance((await client.inbox.get()).message, Pulse):
            pass


MOST_MIB = 200
"""What comes until the broker looks at its connections again; without that it is gigabytes."""


@pytest.mark.parametrize("piece", [LARGE, EMPTY], ids=["large frames", "empty frames"])
async def test_a_message_without_an_end_costs_little_memory(
    piece: bytes, tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker:
        honest = a_client(context, WORK, broker.work_endpoint, name="honest")
        async with in_background(honest.run()):
            await honest.connected_welcome()
            with Memory(broker.pid) as memory:
                await in_thread(endless, partial(ZmtpPeer, port(broker), b"hostile"), piece, ATTACK_S)
            assert memory.growth < MOST_MIB * MIB, f"{memory.growth // MIB} MiB"
            await answered(honest)
        refused = await logged(broker, "connection_refused")
        assert refused["reason"] == "excess"
        assert refused["address"].startswith("127.0.0.1:")
        await scraped(broker, 'gspo_broker_refused_connections_total{reason="excess"} 1.0')


async def test_a_message_of_too_many_frames_is_refused_with_their_number(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker:
        with ZmtpPeer(port(broker), b"hostile") as peer:
            peer.send(message([b""] * 100_000))
            refused = await logged(broker, "message_refused")
        assert "message has 100000 frames, 1 to 64 allowed (MAX_FRAMES)" in refused["reason"]


@needs_closed_doors
async def test_a_flood_is_broken_off_and_honest_peers_are_answered(tmp_path: Path, context: zmq.asyncio.Context) -> None:
    async with broker_process(tmp_path) as broker:
        honest = a_client(context, WORK, broker.work_endpoint, name="honest")
        async with in_background(honest.run()):
            await honest.connected_welcome()
            with Memory(broker.pid) as memory:
                attack = partial(ZmtpPeer, port(broker), b"hostile")
                goes_on = threading.Event()
                goes_on.set()
                async with asyncio.TaskGroup() as tasks:
                    flooding = tasks.create_task(asyncio.to_thread(flood, attack, heartbeat() * 1000, FLOOD_S, goes_on))
                    try:
                        # The flood does not end before them.
                        for _ in range(NUM_ANSWERS):
                            await answered(honest)
                    finally:
                        goes_on.clear()
            assert memory.growth < 150 * MIB, f"{memory.growth // MIB} MiB"
        assert flooding.result() >= 1
        assert broker.count("broker_started") == 1


@needs_closed_doors
async def test_a_flood_of_hellos_is_ignored_and_writes_little_into_the_log(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    async with broker_process(tmp_path) as broker:
        await in_thread(flood, partial(ZmtpPeer, port(broker), b"hostile"), hello("rollout-0") * 100, FLOOD_S)
        honest = a_client(context, WORK, broker.work_endpoint, name="honest")
        async with in_background(honest.run()):
            await honest.connected_welcome()
        assert broker.count("hello") < 500
        reasons = {line["reason"] for line in broker.events if line["event"] == "connection_refused"}
        assert reasons & {"bad_messages", "flood", "excess"}
