"""Watches the connections of a process's binding sockets, and breaks those for which libzmq holds too much.

It runs in its own thread: a busy event loop must not give a sender time to fill the memory.
"""

import asyncio
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from gspo_protocol.limits import PAUSE_S
from gspo_services.shared.net.closed_door import keep_out
from gspo_services.shared.net.connections import Connections, Drain, Excess, InKernel, largest

log = structlog.get_logger()

LOOK_S: Final = 0.01
MAX_EVENTS: Final = 64
"""The most events of a monitor that are handled between two looks."""
MAX_SHARE: Final = 0.05
"""The largest share of time that the looks may take."""
TCP_INFO: Final = 11
BYTES_RECEIVED: Final = struct.Struct("=Q")
BYTES_RECEIVED_AT: Final = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info, since Linux 4.1."""
FIONREAD: Final = 0x541B
QUESTIONED_BYTES: Final = 64 * 1024
"""Only from this many outstanding bytes on, the kernel is asked how many nobody has read."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def received(fd: int) -> InKernel | None:
    """Return the kernel's numbers for a TCP connection; None: it has none. Linux only."""
    info = ctypes.create_string_buffer(256)
    length = ctypes.c_uint32(len(info))
    if _LIBC.getsockopt(fd, socket.IPPROTO_TCP, TCP_INFO, info, ctypes.byref(length)) != 0:
        return None
    if length.value < BYTES_RECEIVED_AT + BYTES_RECEIVED.size:
        return None
    return InKernel(BYTES_RECEIVED.unpack_from(info.raw, BYTES_RECEIVED_AT)[0], 0)


def unread(fd: int) -> int:
    """Return the bytes that the kernel has received but nobody has read."""
    number = ctypes.c_int(0)
    return max(0, number.value) if _LIBC.ioctl(fd, FIONREAD, ctypes.byref(number)) == 0 else 0


def peer_address(fd: int) -> tuple[str, int] | None:
    """Return the other end of a TCP connection; None if it is not one, or has gone."""
    with suppress(OSError), socket.socket(fileno=_duplicate(fd)) as own:
        address = own.getpeername()
        if isinstance(address, tuple):
            return str(address[0]), int(address[1])
    return None


def break_off(fd: int, address: tuple[str, int]) -> bool:
    """End the connection ``fd`` if it is still the one with ``address``: another may have the descriptor by now."""
    with suppress(OSError), socket.socket(fileno=_duplicate(fd)) as own:
        if own.getpeername()[:2] == address:
            # Reset it, also for a sender that waits for room: it would not notice an orderly end.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            own.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _duplicate(fd: int) -> int:
    return os.dup(fd)


class ConnectionWatch:
    """One thread for all channels of a process.

    produces:     ``told`` and ``broken``, called in the event loop with the channel, and what happened
    waits for:    time; events of the sockets' monitors
    unblocked by: ``stop``
    """

    def __init__(
        self, told: Callable[[Connections, int, bool], None], broken: Callable[[Connections, Excess], None]
    ) -> None:
        self._told = told
        self._broken = broken
        self._channels: list[tuple[Connections, Drain]] = []
        self._monitors: dict[zmq.Socket[bytes], Connections] = {}
        self._empty_at: dict[zmq.Socket[bytes], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counts = sys.platform.startswith("linux")
        self._said_that_doors_stay_open = False

    def add(self, connections: Connections, drain: Drain, monitor: Any) -> None:
        """Watch a channel, which ``drain`` reads, by the monitor of its socket. Nothing else may read the monitor."""
        self._channels.append((connections, drain))
        if isinstance(monitor, zmq.Socket):
            shadow: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)
            self._monitors[shadow], self._empty_at[shadow] = connections, time.monotonic()

    def start(self) -> None:
        """Begin. Where nothing counts what connections receive, that is logged."""
        if not self._monitors:
            return
        if not self._counts:
            log.warning("connections_not_counted", reason="only Linux tells how much a connection has received")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="connection-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. A second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def pause(self, connections: Connections, host: str, seconds: float) -> None:
        """Accept no new connection of a channel from ``host`` for a while."""
        until = time.monotonic() + seconds
        with self._lock:
            connections.paused[host] = max(connections.paused.get(host, 0.0), until)
            self._close_door(connections)

    def _close_door(self, connections: Connections) -> None:
        if self._counts and connections.listener >= 0:
            if keep_out(connections.listener, connections.paused) or self._said_that_doors_stay_open:
                return
            self._said_that_doors_stay_open = True
            reason = (
                "this kernel lets only root attach filters to sockets: hosts that break the rules are cut off after they "
                "connect, which costs memory; put a firewall in front of ports that strangers reach"
            )
            log.warning("hosts_not_kept_out", reason=reason)

    def _open_doors(self, now: float) -> None:
        with self._lock:
            for connections, _ in self._channels:
                over = [host for host, until in connections.paused.items() if until <= now]
                for host in over:
                    del connections.paused[host]
                if over:
                    self._close_door(connections)

    def _run(self) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        looked, pause_s = 0.0, LOOK_S
        while not self._ended.is_set():
            poller.poll(int(LOOK_S * 1000))
            for monitor in self._monitors:
                self._hear(monitor)
            begin = time.monotonic()
            self._open_doors(begin)
            if self._counts and begin - looked >= pause_s:
                self.look()
                looked = time.monotonic()
                pause_s = max(LOOK_S, (looked - begin) / MAX_SHARE)

    def _hear(self, monitor: zmq.Socket[bytes]) -> None:
        """Handle what a monitor says. It may say so long after the event: the peer may even have been admitted since."""
        for _ in range(MAX_EVENTS):
            empty_at = time.monotonic()
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                self._empty_at[monitor] = empty_at
                return
            self._on_event(self._monitors[monitor], event, self._empty_at[monitor])

    def _on_event(self, connections: Connections, event: Mapping[str, Any], since: float) -> None:
        """``since``: the event came no earlier."""
        kind, fd, paused = event["event"], event["value"], False
        if kind == zmq.EVENT_LISTENING:
            connections.listener = fd
            return
        if kind == zmq.EVENT_ACCEPTED:
            paused = self._accepted(connections, fd, since)
        elif kind == zmq.EVENT_DISCONNECTED:
            with self._lock:
                connections.closed(fd)
        self._tell(self._told, connections, kind, paused)

    def _accepted(self, connections: Connections, fd: int, since: float) -> bool:
        """Return whether a new connection was broken off at once, because its host is paused."""
        address = peer_address(fd)
        if address is None:
            return False
        with self._lock:
            connections.accepted(fd, address, since)
            paused = connections.paused.get(address[0], 0.0) > time.monotonic()
        return paused and break_off(fd, address)

    def look(self) -> None:
        """Look at every connection once, and break those that hold too much."""
        found: list[tuple[Connections, Excess]] = []
        with self._lock:
            for connections, drain in self._channels:
                numbers = {fd: number for fd in connections.by_fd if (number := self._received(connections, fd)) is not None}
                found += [(connections, excess) for excess in connections.look(numbers, drain)]
                if connections.has_suspects:
                    self._ask_to_drain(drain)
            worst = largest([connections for connections, _ in self._channels])
            if worst is not None and not found:
                found += [(each, worst) for each, _ in self._channels if worst.connection.fd in each.by_fd]
            for connections, excess in found:
                connections.closed(excess.connection.fd)
        for connections, excess in found:
            if break_off(excess.connection.fd, excess.connection.address):
                self.pause(connections, excess.connection.address[0], PAUSE_S)
                self._tell(self._broken, connections, excess)

    def _received(self, connections: Connections, fd: int) -> InKernel | None:
        number = received(fd)
        if number is None or number.num_bytes - connections.by_fd[fd].delivered < QUESTIONED_BYTES:
            return number
        return InKernel(number.num_bytes, unread(fd))

    def _tell(self, listener: Callable[..., None], *what: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(listener, *what)

    def _ask_to_drain(self, drain: Drain) -> None:
        """A reader that waits finds nothing, and does not say so again: look at it after it had time to wake up."""
        self._tell(_drained, self._loop, drain, 4)


def _drained(loop: asyncio.AbstractEventLoop, drain: Drain, rounds: int) -> None:
    if rounds:
        loop.call_soon(_drained, loop, drain, rounds - 1)
    elif drain.is_waiting:
        drain.num_drained += 1
