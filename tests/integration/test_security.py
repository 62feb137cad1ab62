"""No one in: real sockets, a real broker with keys, and everybody who should not get in."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from protocol.channels import WORK
from services.runtime.lifecycle import ServiceError, flatten
from services.runtime.peer import PeerClient
from tests.support.broker_peers import ScriptedLearner, ScriptedRollout
from tests.support.broker_process import BrokerProcess, broker_process
from tests.support.keys import counted, make_keys, security_of
from tests.support.zmq_ends import a_client

SOON_S = 20.0


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@contextlib.asynccontextmanager
async def secured_broker(tmp_path: Path, keys: Path) -> AsyncIterator[BrokerProcess]:
    async with broker_process(tmp_path, security={"keys": str(keys)}) as broker:
        yield broker


async def refusal_of(client: PeerClient) -> str:
    """Why a client gives up."""
    try:
        async with asyncio.timeout(SOON_S):
            await client.run()
    except ExceptionGroup as group:
        (error,) = flatten(group)
        assert isinstance(error, ServiceError), error
        return str(error)
    raise AssertionError("it goes on")


async def whole_run(context: zmq.asyncio.Context, broker: BrokerProcess, keys: Path) -> ScriptedLearner:
    """Two rollouts and a learner until the end of the run."""
    rollouts = [
        ScriptedRollout(context, broker.work_endpoint, f"r{index}", "s", security=security_of(keys, "rollout"))
        for index in range(2)
    ]
    learner = ScriptedLearner(context, broker.batch_endpoint, "s", security=security_of(keys, "learner"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for rollout in rollouts:
            tasks.create_task(rollout.run())
        tasks.create_task(learner.run())
    return learner


async def test_a_run_with_keys_goes_on_while_strangers_knock(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    stranger = make_keys(tmp_path / "strange")
    (stranger / "broker.public").write_bytes((keys / "broker.public").read_bytes())
    async with secured_broker(tmp_path, keys) as broker:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(whole_run(context, broker, keys))
            wrong_key = a_client(context, WORK, broker.work_endpoint, security=security_of(stranger, "rollout"))
            unlisted = tasks.create_task(refusal_of(wrong_key))
            plain = tasks.create_task(refusal_of(a_client(context, WORK, broker.work_endpoint)))
            wrong_role = a_client(context, WORK, broker.work_endpoint, security=security_of(keys, "learner"))
            misplaced = tasks.create_task(refusal_of(wrong_role))
            for garbage in garbages():
                tasks.create_task(asyncio.to_thread(throw, broker.work_endpoint, garbage))
        assert running.result().end is not None
        assert running.result().end.reason == "all 4 batches are trained"
        assert "refused the key rollout (" in unlisted.result()
        assert "put rollout.public into its security.keys" in unlisted.result()
        assert "set security.keys" in plain.result()
        assert "refused the key learner (" in misplaced.result()
        assert "only keys of rollout may use this channel" in misplaced.result()
        _, metrics = await broker.http("/metrics")
        refused = "gspo_broker_refused_connections_total"
        assert counted(metrics, refused, reason="unknown_key") >= 5
        assert counted(metrics, refused, reason="wrong_role") >= 5
        assert counted(metrics, refused, reason="handshake") >= 5
        assert counted(metrics, refused, reason="impostor") == 0
        connections = "gspo_broker_connections_total"
        assert counted(metrics, connections, outcome="admitted") == 3
        assert counted(metrics, connections, outcome="accepted") >= 3 + 3 * 5 + len(garbages())
        assert broker.count("connection_refused") == 3, "one line for each reason within ten seconds"
        assert counted(metrics, "gspo_broker_refused_total", reason="undecodable", type="") == 0
        assert await broker.terminate() == 0


def garbages() -> list[bytes]:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    return [
        b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
        bytes(range(256)) * 16,
        b"\xff" * 4096,
        greeting + b"NULL".ljust(20, b"\0") + bytes(32),
        greeting + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + struct.pack(">Q", 2**62) + bytes(512),
        greeting + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8" + b"\x05HELLO\x01\x00" + bytes(192),
    ]


def throw(endpoint: str, data: bytes) -> None:
    """Send bytes to a port, and wait until it hangs up."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOON_S) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
