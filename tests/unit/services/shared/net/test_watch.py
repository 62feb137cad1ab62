"""What the kernel says about real connections, and a thread that breaks those that hold too much."""

import asyncio
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from gspo_services.shared.net.authenticator import WATCHED
from gspo_services.shared.net.connections import SLACK_BYTES, Connections, Excess
from gspo_services.shared.net.frames import FrameReader
from gspo_services.shared.net.watch import LOOK_S, ConnectionWatch, break_off, peer_address, received, unread
from tests.support.wire.attacks import MIB
from tests.support.wire.closed_door import may_close_doors, needs_closed_doors
from tests.support.wire.zmq_ends import in_background
from tests.support.wire.zmtp import ZmtpPeer, frame, message

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts what connections receive")
SOON_S = 10.0
PAUSED_S = 0.5
MAX_UNFINISHED = MIB


@contextmanager
def a_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: the one that was accepted, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield accepted, client


def test_the_kernel_counts_what_came_and_what_nobody_has_read() -> None:
    with a_pair() as (accepted, client):
        client.sendall(bytes(1000))
        accepted.recv(1000, socket.MSG_WAITALL | socket.MSG_PEEK)
        numbers = received(accepted.fileno())
        assert numbers is not None
        assert (numbers.num_bytes, unread(accepted.fileno())) == (1000, 1000)
        accepted.recv(300, socket.MSG_WAITALL)
        numbers = received(accepted.fileno())
        assert numbers is not None
        assert (numbers.num_bytes, unread(accepted.fileno())) == (1000, 700)


def test_what_is_no_tcp_connection_has_no_numbers_and_no_address() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert received(one.fileno()) is None
        assert peer_address(one.fileno()) is None
    number = one.fileno()
    assert (received(number), unread(number), peer_address(number)) == (None, 0, None)
    assert not break_off(number, ("127.0.0.1", 1))


def test_a_connection_is_broken_with_a_reset_and_only_if_it_is_still_the_one_that_was_meant() -> None:
    with a_pair() as (accepted, client):
        address = client.getsockname()
        assert peer_address(accepted.fileno()) == address
        assert not break_off(accepted.fileno(), (address[0], address[1] + 1))
        client.sendall(b"still here")
        assert accepted.recv(64) == b"still here"
        assert break_off(accepted.fileno(), address)
        assert client.recv(1) == b""
        linger = struct.unpack("ii", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
        assert linger == (1, 0), "its last close resets: a sender that waits for room hears of nothing less"


@dataclass
class Watched:
    """A ROUTER that is read and watched, and what its watch says."""

    port: int
    connections: Connections
    watch: ConnectionWatch
    reader: FrameReader
    told: list[tuple[int, bool]] = field(default_factory=list)
    broken: list[Excess] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)

    async def read(self) -> None:
        while True:
            parts = await self.reader.read()
            self.connections.delivered(parts.fd, parts.wire_bytes, parts.peer, parts.key)
            self.messages.append(parts.num_bytes)


@contextmanager
def watched(*, max_held: int = 8 * MIB, started: bool = True) -> Iterator[Watched]:
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    connections = Connections(channel="work", max_unfinished=MAX_UNFINISHED, max_held=max_held)
    reader = FrameReader(router, secure=False)
    watch = ConnectionWatch(
        lambda connections, event, paused: made.told.append((event, paused)),
        lambda connections, excess: made.broken.append(excess),
    )
    monitor = router.get_monitor_socket(WATCHED)
    watch.add(connections, reader, monitor)
    router.bind("tcp://127.0.0.1:*")
    port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    made = Watched(port, connections, watch, reader)
    if started:
        watch.start()
    try:
        yield made
    finally:
        watch.stop()
        router.disable_monitor()
        monitor.close(linger=0)
        router.close(linger=0)
        context.destroy(linger=0)


async def until(condition: Callable[[], object]) -> None:
    """Let others run until ``condition`` holds: the thread that is watched sets no event."""
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def knock(port: int) -> ZmtpPeer:
    return await asyncio.to_thread(ZmtpPeer, port, b"peer")


async def is_broken(peer: ZmtpPeer, piece: bytes) -> bool:
    """Whether the other end breaks the connection over which ``piece`` comes again and again."""
    with peer:
        try:
            # Far more than it takes: a busy machine looks late.
            for _ in range(20_000):
                await asyncio.to_thread(peer.send, piece)
        except OSError:
            return True
    return False


async def test_connections_come_and_go_with_their_addresses() -> None:
    with watched() as end:
        await until(lambda: end.connections.listener >= 0)
        with await knock(end.port) as peer:
            await until(lambda: len(end.connections.by_fd) == 1)
            (connection,) = end.connections.by_fd.values()
            assert connection.address == peer.socket.getsockname()
            await until(lambda: (zmq.EVENT_ACCEPTED, False) in end.told)
        await until(lambda: (zmq.EVENT_DISCONNECTED, False) in end.told)
        assert end.connections.by_fd == {}
        assert end.broken == []


async def since(end: Watched, then: Callable[[], None] = lambda: None) -> float:
    """Return the date of a new connection, whose handshake is over when ``then`` is called."""
    with await knock(end.port):
        then()
        await until(lambda: end.connections.by_fd)
        (connection,) = end.connections.by_fd.values()
    await until(lambda: not end.connections.by_fd)
    return connection.since


async def test_a_connection_is_dated_before_its_handshake_however_late_the_watch_hears_of_it() -> None:
    with watched(started=False) as end:
        admitted: list[float] = []

        def late() -> None:
            admitted.append(time.monotonic())
            end.watch.start()

        assert await since(end, late) < admitted[0]
        async with asyncio.timeout(SOON_S):
            idle_from = float("inf")
            while await since(end) < idle_from:
                await asyncio.sleep(2 * LOOK_S)
                idle_from = time.monotonic()
                await asyncio.sleep(2 * LOOK_S)


async def test_a_message_without_an_end_is_broken_off_and_its_host_waits_outside_for_a_while() -> None:
    with watched(max_held=64 * MIB) as end:
        async with in_background(end.read()):
            assert await is_broken(await knock(end.port), frame(bytes(100_000), more=True))
            await until(lambda: end.broken)
            (excess,) = end.broken
            assert excess.reason == "a message without an end"
            assert excess.connection.held > MAX_UNFINISHED
            assert "127.0.0.1" in end.connections.paused
            assert end.messages == []


async def test_whole_messages_however_many_are_not_broken_off() -> None:
    # A busy machine reads late: with less room all that waits would be more than a sender's credit.
    with watched(max_held=64 * MIB) as end:
        async with in_background(end.read()):
            with await knock(end.port) as peer:
                await asyncio.to_thread(peer.send, message([bytes(MAX_UNFINISHED - 100)]) * 40)
                await until(lambda: len(end.messages) == 40)
            assert end.broken == []


async def test_messages_that_nobody_reads_are_broken_off_above_the_credit() -> None:
    with watched(max_held=2 * MIB) as end:
        assert await is_broken(await knock(end.port), message([bytes(100_000)]))
        await until(lambda: end.broken)
        assert end.broken[0].reason == "messages beyond its credit"
        assert end.broken[0].connection.held > 2 * MIB + SLACK_BYTES


@pytest.mark.skipif(may_close_doors(), reason="this kernel keeps hosts out for this user")
async def test_where_the_kernel_keeps_nobody_out_that_is_said_once() -> None:
    with watched() as end, capture_logs() as said:
        await until(lambda: end.connections.listener >= 0)
        for host in ("127.0.0.2", "127.0.0.3"):
            end.watch.pause(end.connections, host, PAUSED_S)
    assert [each["event"] for each in said if each["log_level"] == "warning"] == ["hosts_not_kept_out"]


@needs_closed_doors
async def test_a_paused_host_gets_in_again_when_its_time_is_over() -> None:
    with watched() as end:
        await until(lambda: end.connections.listener >= 0)
        end.watch.pause(end.connections, "127.0.0.1", PAUSED_S)
        end.watch.pause(end.connections, "127.0.0.1", PAUSED_S / 10)  # Never shorter than it was.
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(socket.create_connection, ("127.0.0.1", end.port), PAUSED_S / 2)
        with await knock(end.port):
            await until(lambda: end.connections.by_fd)
        assert end.connections.paused == {}


async def test_a_connection_of_a_paused_host_that_came_through_the_door_is_broken_off_at_once() -> None:
    """One that the kernel had accepted before its host was paused."""
    with watched() as end, closing(socket.socket()) as client:
        end.connections.paused["127.0.0.1"] = float("inf")  # The door itself stays open.
        await asyncio.to_thread(client.connect, ("127.0.0.1", end.port))
        await until(lambda: (zmq.EVENT_ACCEPTED, True) in end.told)
        client.settimeout(SOON_S)
        with suppress(ConnectionResetError):
            while await asyncio.to_thread(client.recv, 4096):
                pass


async def test_the_thread_ends_when_it_is_stopped_and_a_second_stop_does_nothing() -> None:
    with watched() as end:
        assert any(thread.name == "connection-watch" for thread in threading.enumerate())
        end.watch.stop()
        end.watch.stop()
        assert not any(thread.name == "connection-watch" for thread in threading.enumerate())
