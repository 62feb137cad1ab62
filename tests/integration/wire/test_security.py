"""A real broker with keys, over real sockets, and everything that must not get in."""

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WEIGHTS, WORK, ChannelSpec
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Heartbeat, Hello, Pulse, Refused, Role, Welcome
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.snapshot import SnapshotStore
from gspo_services.learner.weights.weight_server import WeightServer
from gspo_services.shared.net.authenticator import Authenticator
from gspo_services.shared.net.channel import DealerChannel, RouterChannel
from gspo_services.shared.net.peer import PeerClient
from gspo_services.shared.net.security import Security
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.errors import EndpointError, ServiceError, flatten
from tests.support.broker.peers import ScriptedLearner, ScriptedRollout
from tests.support.broker.process import BrokerProcess, scraped
from tests.support.wire.keys import counted, make_keys, security_of
from tests.support.wire.secured import SOON_S, ask, connection, secured_broker
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, a_client, in_background, zmq_context


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


async def refusal_of(client: PeerClient) -> str:
    """The error that a client gives up with."""
    try:
        async with asyncio.timeout(SOON_S):
            await client.run()
    except ExceptionGroup as group:
        (error,) = flatten(group)
        assert isinstance(error, ServiceError), error
        return str(error)
    raise AssertionError("the client continues")


async def whole_run(context: zmq.asyncio.Context, broker: BrokerProcess, keys: Path) -> ScriptedLearner:
    """Two rollouts and a learner, until the end of the run."""
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


async def test_a_run_with_keys_continues_while_strangers_connect(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    stranger = make_keys(tmp_path / "strange")
    (stranger / "broker.public").write_bytes((keys / "broker.public").read_bytes())
    async with secured_broker(tmp_path, keys) as broker:
        began = time.monotonic()
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
        assert counted(metrics, connections, outcome="admitted") >= 3
        assert counted(metrics, connections, outcome="accepted") >= 3 + 3 * 5 + len(garbages())
        lines_a_reason = 1 + int((time.monotonic() - began) / 10)
        assert 3 <= broker.count("connection_refused") <= 3 * lines_a_reason, "one for each reason within ten seconds"
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
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            return  # It hung up already.
        while connection.recv(65536):
            pass


# --- claims of an admitted key ----------------------------------------------------------------------------------------


def a_hello(role: Role, peer: str) -> Hello:
    return Hello(protocol_version=PROTOCOL_VERSION, role=role, peer=peer, session="s")


async def test_an_admitted_key_cannot_claim_another_role_or_name(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    make_keys(keys, ["rollout-7"])
    async with secured_broker(tmp_path, keys) as broker:
        shared, own = security_of(keys, "rollout"), security_of(keys, "rollout", "rollout-7")
        operator = security_of(keys, "operator")
        claims: list[tuple[ChannelSpec, Security, Role, str, str]] = [
            (WORK, shared, "learner", "learner", "the key rollout belongs to a rollout and cannot act as a learner"),
            (WORK, shared, "rollout", "rollout-7", "cannot speak for rollout-7, which has the key rollout-7"),
            (WORK, own, "rollout", "rollout-8", "cannot speak for rollout-8, which has the key rollout"),
            (BATCH, operator, "learner", "learner", "the key operator belongs to a operator and cannot act as a learner"),
        ]
        for number, (spec, security, role, peer, reason) in enumerate(claims):
            async with connection(context, spec, broker, security, f"c{number}") as channel:
                refused = await ask(channel, a_hello(role, peer))
                assert isinstance(refused, Refused)
                assert refused.fatal
                assert reason in refused.reason
        async with connection(context, WORK, broker, own, "rollout-7") as channel:
            assert isinstance(await ask(channel, a_hello("rollout", "rollout-7")), Welcome)
        await scraped(broker, 'gspo_broker_refused_connections_total{reason="impostor"} 4.0')


async def test_taking_a_connections_identity_does_not_give_its_session(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    make_keys(keys, ["rollout-1", "rollout-2"])
    async with secured_broker(tmp_path, keys) as broker:
        one, two = (security_of(keys, "rollout", f"rollout-{number}") for number in (1, 2))
        beat = Heartbeat(policy_version=0, status="serving", leases=[])
        async with connection(context, WORK, broker, one, "rollout-1") as rightful:
            assert isinstance(await ask(rightful, a_hello("rollout", "rollout-1")), Welcome)
            async with connection(context, WORK, broker, two, "rollout-1") as thief:
                assert await thief.send(beat)
                for _ in range(3):
                    assert isinstance(await ask(rightful, beat), Pulse)


async def test_a_key_is_admitted_and_revoked_without_a_restart(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    async with secured_broker(tmp_path, keys) as broker:
        await broker.logged("allow_list_loaded")
        make_keys(keys, ["rollout-9"])
        await broker.logged("allow_list_loaded", 2)
        security = security_of(keys, "rollout", "rollout-9")
        async with connection(context, WORK, broker, security, "rollout-9") as channel:
            assert isinstance(await ask(channel, a_hello("rollout", "rollout-9")), Welcome)
            (keys / "rollout-9.public").unlink()
            await broker.logged("allow_list_loaded", 3)
            refused = await ask(channel, Heartbeat(policy_version=0, status="serving", leases=[]))
            assert isinstance(refused, Refused)
            assert refused.fatal
            assert "not in the allow-list any more" in refused.reason
        newcomer = a_client(context, WORK, broker.work_endpoint, name="rollout-9", security=security)
        assert "refused the key rollout-9" in await refusal_of(newcomer)


async def test_a_broken_key_directory_leaves_the_allow_list_as_it_was(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    async with secured_broker(tmp_path, keys) as broker:
        await broker.logged("allow_list_loaded")
        (keys / "rollout.public").write_text("half a key")
        await broker.logged("allow_list_kept")
        async with connection(context, WORK, broker, security_of_secret(keys, "rollout"), "r") as channel:
            assert isinstance(await ask(channel, a_hello("rollout", "r")), Welcome)


def security_of_secret(keys: Path, name: str) -> Security:
    """The key of a process with the same secret, whose own directory is intact."""
    other = make_keys(keys.parent / f"of-{name}")
    for file in (f"{name}.secret", "broker.public"):
        (other / file).write_bytes((keys / file).read_bytes())
    return security_of(other, "rollout", name)


# --- the other end is the wrong one --------------------------------------------------------------------------------


async def test_a_client_with_a_key_says_that_the_other_end_has_none(keys: Path) -> None:
    async with zmq_context() as context:
        end = ScriptedEnd(context, WORK)
        reason = await refusal_of(a_client(context, WORK, end.endpoint, security=security_of(keys, "rollout")))
    assert end.endpoint in reason
    assert "does it use keys at all?" in reason or "uses no keys and this process does" in reason


async def test_a_client_with_the_wrong_key_of_the_broker_says_which_file_to_look_at(
    tmp_path: Path, keys: Path, context: zmq.asyncio.Context
) -> None:
    async with secured_broker(tmp_path, keys) as broker:
        security = security_of(keys, "rollout")
        (keys / "broker.public").write_bytes((make_keys(tmp_path / "other") / "broker.public").read_bytes())
        reason = await refusal_of(a_client(context, WORK, broker.work_endpoint, security=security))
    assert f"is broker.public in {keys} its public key" in reason


async def test_without_keys_only_endpoints_of_this_host_are_used(context: zmq.asyncio.Context) -> None:
    for endpoint in ("tcp://0.0.0.0:0", "tcp://10.1.2.3:7001"):
        with pytest.raises(EndpointError, match=r"set security\.keys"):
            RouterChannel(context, WORK, endpoint)
        with pytest.raises(EndpointError, match=r"set security\.keys"):
            DealerChannel(context, WORK, endpoint, "r")


# --- replay ---------------------------------------------------------------------------------------------------------------


async def test_a_recorded_connection_cannot_be_replayed(tmp_path: Path, keys: Path, context: zmq.asyncio.Context) -> None:
    async with secured_broker(tmp_path, keys) as broker:
        recorded = bytearray()
        async with recorder(broker.work_endpoint, recorded) as endpoint:
            client = a_client(context, WORK, endpoint, security=security_of(keys, "rollout"))
            async with in_background(client.run()):
                await client.connected_welcome()
                await client.send(Heartbeat(policy_version=0, status="starting", leases=[]))
                while not isinstance((await client.inbox.get()).message, Pulse):
                    pass
        assert b"CURVE" in recorded
        assert b"heartbeat" not in recorded, "what is said can be read"
        await asyncio.to_thread(throw, broker.work_endpoint, bytes(recorded))
        await scraped(
            broker,
            'gspo_broker_connections_total{outcome="accepted"} 2.0',
            'gspo_broker_connections_total{outcome="admitted"} 1.0',
            'gspo_broker_messages_total{type="hello"} 1.0',
            'gspo_broker_messages_total{type="heartbeat"} 1.0',
        )


@contextlib.asynccontextmanager
async def recorder(endpoint: str, recorded: bytearray) -> AsyncIterator[str]:
    """A relay to ``endpoint`` that records what goes there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, far_writer, recorded))
            tasks.create_task(copy(far_reader, writer, bytearray()))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            record += data
            writer.write(data)
            await writer.drain()
    writer.close()


# --- weights --------------------------------------------------------------------------------------------------------------


async def test_only_rollouts_get_weights(keys: Path) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    async with zmq_context() as context, zmq_context() as outside:
        authenticator = Authenticator(
            context, security_of(keys, "learner"), MonotonicClock(), metrics.authenticator_counters
        )
        channel = RouterChannel(context, WEIGHTS, ANY_PORT, authenticator)
        server = WeightServer(channel, SnapshotStore(), metrics)
        async with in_background(authenticator.run(), server.run()):
            rollout = a_client(outside, WEIGHTS, channel.endpoint, security=security_of(keys, "rollout"))
            async with in_background(rollout.run()):
                assert (await rollout.connected_welcome()).run_id == "weights"
            operator = a_client(outside, WEIGHTS, channel.endpoint, security=security_of(keys, "operator"))
            assert "only keys of rollout and learner may use this channel" in await refusal_of(operator)
    refused = {"reason": "wrong_role"}
    # More than five where a busy machine lets the refused peer wait for its answer, and it connects again.
    assert (registry.get_sample_value("gspo_learner_refused_connections_total", refused) or 0.0) >= 5.0
