"""What hostile peers do to a real broker, and how much of its memory that costs."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import psutil

from gspo_protocol.codec import encode
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import Heartbeat, Hello, Message
from tests.support.wire.zmtp import ZmtpPeer, frame, message

MIB: Final = 1024 * 1024
STUCK_S: Final = 2.0
LARGE: Final = frame(bytes(1_000_000), more=True)
EMPTY: Final = frame(b"", more=True) * 50_000


class Memory:
    """The most memory that a process had while the block ran, above what it had before. Use as a context manager."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure)
        self.growth = 0

    def __enter__(self) -> Self:
        self._before = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.wait(0.005):
            self.growth = max(self.growth, self._process.memory_info().rss - self._before)


def endless(make: Callable[[], ZmtpPeer], piece: bytes, seconds: float) -> int:
    """Send frames of one message for as long as the other end takes them. Returns how many bytes it took."""
    sent, deadline = 0, time.monotonic() + seconds
    with make() as peer:
        peer.socket.settimeout(STUCK_S)
        try:
            while time.monotonic() < deadline:
                peer.send(piece)
                sent += len(piece)
        except OSError:
            return sent
    raise AssertionError(f"{sent} bytes of one message in {seconds} s, and the other end still takes more")


def encoded(sent: Message) -> bytes:
    return message(bytes(part) for part in encode(sent))


def hello(peer: str, session: str = "s") -> bytes:
    return encoded(Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer=peer, session=session))


def heartbeat() -> bytes:
    return encoded(Heartbeat(policy_version=0, status="starting", leases=[]))


def flood(make: Callable[[], ZmtpPeer], piece: bytes, seconds: float, goes_on: threading.Event | None = None) -> int:
    """Send whole messages as fast as possible for ``seconds``, and then while ``goes_on`` is set, over as many
    connections as it takes. Returns how many were broken off."""
    broken, deadline = 0, time.monotonic() + seconds

    def lasts() -> bool:
        return time.monotonic() < deadline or (goes_on is not None and goes_on.is_set())

    while lasts():
        try:
            with make() as peer:
                peer.socket.settimeout(STUCK_S)
                while lasts():
                    peer.send(piece)
        except (OSError, TimeoutError):
            broken += 1
    return broken


async def in_thread(attack: Callable[..., int], *arguments: object) -> int:
    return await asyncio.to_thread(attack, *arguments)
