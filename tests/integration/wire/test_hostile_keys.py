"""A real broker under attack by the owner of an admitted key: encrypted, and bounded and broken off all the same."""

import asyncio
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_protocol.limits import PAUSE_S
from gspo_services.shared.net import Security
from tests.support.broker.process import BrokerProcess, scraped
from tests.support.wire.attacks import MIB, STUCK_S, Memory, in_thread
from tests.support.wire.closed_door import needs_closed_doors
from tests.support.wire.curve import CurvePeer
from tests.support.wire.keys import make_keys, security_of
from tests.support.wire.secured import secured_broker
from tests.support.wire.zmq_ends import a_client, in_background

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts what connections receive")
ATTACK_S = 20.0
PATIENCE_S = 30.0
MOST_MIB = 100


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def endless(port: int, security: Security) -> int:
    """Send encrypted frames of one message for as long as the other end takes them. Returns how many bytes it took."""
    sent, deadline = 0, time.monotonic() + ATTACK_S
    with CurvePeer(port, b"hostile", security) as peer:
        peer.socket.settimeout(STUCK_S)
        try:
            while time.monotonic() < deadline:
                piece = peer.sealed(bytes(1_000_000), more=True)
                peer.send(piece)
                sent += len(piece)
        except OSError:
            return sent
    raise AssertionError(f"{sent} bytes of one message in {ATTACK_S} s, and the other end still takes more")


async def attack(broker: BrokerProcess, security: Security) -> datetime:
    """An endless message under a key. Returns when the broker broke it off: the other end may be late to notice."""
    port = int(broker.work_endpoint.rpartition(":")[2])
    with Memory(broker.pid) as memory:
        assert await in_thread(partial(endless, port, security)) > MIB
    assert memory.growth < MOST_MIB * MIB, f"{memory.growth // MIB} MiB"
    await broker.logged("connection_refused")
    refused = broker.last("connection_refused")
    assert refused["reason"] == "excess"
    assert security.own is not None
    assert refused["key"] == security.own.name
    return datetime.fromisoformat(refused["timestamp"])


@needs_closed_doors
async def test_an_endless_message_under_a_shared_key_is_cut_off_and_its_next_honest_connection_is_served(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    keys = make_keys(tmp_path / "keys")
    security = security_of(keys, "rollout")
    async with secured_broker(tmp_path, keys) as broker:
        ended = await attack(broker, security)
        honest = a_client(context, WORK, broker.work_endpoint, name="honest", security=security)
        async with in_background(honest.run()), asyncio.timeout(PATIENCE_S):
            await honest.connected_welcome()
        waited_s = (datetime.now(UTC) - ended).total_seconds()
        assert waited_s > PAUSE_S / 2, "its host had to wait"
        await scraped(broker, 'gspo_broker_refused_connections_total{reason="excess"} 1.0')


@needs_closed_doors
async def test_an_endless_message_under_an_own_key_shuts_that_key_out_and_no_other(
    tmp_path: Path, context: zmq.asyncio.Context
) -> None:
    keys = make_keys(tmp_path / "keys")
    make_keys(keys, ["rollout-1", "rollout-2"])
    bad, good = (security_of(keys, "rollout", name) for name in ("rollout-1", "rollout-2"))
    async with secured_broker(tmp_path, keys) as broker:
        await attack(broker, bad)
        honest = a_client(context, WORK, broker.work_endpoint, name="rollout-2", security=good)
        async with in_background(honest.run()), asyncio.timeout(PATIENCE_S):
            await honest.connected_welcome()
            with pytest.raises(ConnectionRefusedError, match="400"):
                await asyncio.to_thread(CurvePeer, int(broker.work_endpoint.rpartition(":")[2]), b"again", bad)
        await scraped(broker, 'gspo_broker_refused_connections_total{reason="shut_out"} 1.0')
