"""Reads whole messages from a ROUTER: no more frames than a message may have, and from which connection they came."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Final, cast

import zmq
import zmq.asyncio

from gspo_protocol import limits
from gspo_protocol.codec import Frame

MAX_IDENTITY_BYTES: Final = 255
VIEWED_BYTES: Final = 65_536
"""Larger frames are not copied."""
SLICE_FRAMES: Final = 4096
"""Frames of one message that are thrown away before other tasks get to run."""
MAX_IN_A_ROW: Final = 64
"""Messages that are received before other tasks get to run."""
CURVE_FRAME_BYTES: Final = 33
SHORT_BYTES: Final = 255


@dataclass(frozen=True, kw_only=True)
class WireParts:
    """One message as it came. ``fd``: the connection's file descriptor; -1: unknown. ``num_bytes``: of all its frames."""

    peer: bytes
    key: bytes
    fd: int
    frames: list[Frame]
    num_frames: int
    num_bytes: int
    wire_bytes: int
    """Bytes that it took on the connection."""


def whole(frames: list[bytes]) -> WireParts:
    """A message that was read already, of the one peer that there is."""
    num_bytes = sum(map(len, frames))
    return WireParts(
        peer=b"",
        key=b"",
        fd=-1,
        frames=list(frames),
        num_frames=len(frames),
        num_bytes=num_bytes,
        wire_bytes=num_bytes,
    )


class FrameReader:
    """The frames of one ROUTER.

    ``is_waiting``: everything that had arrived was read. ``num_drained`` counts how often that was found.
    """

    def __init__(self, socket: zmq.asyncio.Socket, *, secure: bool) -> None:
        self._socket = socket
        self._recv = receiver(socket)
        self._secure = secure
        self._overhead = CURVE_FRAME_BYTES if secure else 0
        self._in_a_row = 0
        self._rest: _Partial | None = None
        self.is_waiting = False
        self.num_drained = 0

    async def read(self) -> WireParts:
        """Wait for the next message."""
        while True:
            if self._rest is None:
                partial = _Partial(await self._first())
                self._rest = partial
            else:
                partial = self._rest
            if partial.take(self._recv, self._overhead):
                self._rest = None
                return partial.parts(self._secure)
            await asyncio.sleep(0)

    async def _first(self) -> zmq.Frame:
        try:
            # A message that is already there is read without a future and the event loop, which cost more than the reading.
            frame = self._recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._in_a_row = 0
            return await self._wait()
        self._in_a_row += 1
        if self._in_a_row % MAX_IN_A_ROW == 0:
            self._rest = _Partial(frame)
            await asyncio.sleep(0)  # Other tasks get to run, however much comes in.
            self._rest = None
        return frame

    async def _wait(self) -> zmq.Frame:
        self.num_drained += 1
        self.is_waiting = True
        waiting = cast("asyncio.Future[zmq.Frame]", self._socket.recv(copy=False))
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._rest = _Partial(waiting.result())  # Its other frames are still to be read.
            raise
        finally:
            self.is_waiting = False


@singledispatch
def receiver(socket: Any) -> Callable[..., zmq.Frame]:
    """A socket's ``recv`` that returns at once and without a future."""
    shadow: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
    return shadow.recv


class _Partial:
    """A message of which some frames were read. libzmq hands over whole messages: the others are there."""

    def __init__(self, first: zmq.Frame) -> None:
        self._first = first
        self._frames: list[Frame] = []
        self._num_frames = 0
        self._num_bytes = 0
        self._wire_bytes = 0
        self._more = bool(first.more)

    def take(self, recv: Callable[..., zmq.Frame], overhead: int) -> bool:
        """Read frames; those beyond a message's limit are thrown away. Returns whether the message is whole."""
        for _ in range(SLICE_FRAMES):
            if not self._more:
                return True
            frame = recv(zmq.NOBLOCK, copy=False)
            size = len(frame)
            body = size + overhead
            self._more = bool(frame.more)
            self._num_frames += 1
            self._num_bytes += size
            self._wire_bytes += body + (2 if body <= SHORT_BYTES else 9)
            if self._num_frames <= limits.MAX_FRAMES:
                self._frames.append(frame.bytes if size <= VIEWED_BYTES else frame.buffer)
            elif self._frames:
                self._frames.clear()
        return not self._more

    def parts(self, secure: bool) -> WireParts:
        first = self._first
        return WireParts(
            peer=first.bytes,
            key=str(first.get("User-Id")).encode() if secure else b"",
            fd=_fd(first),
            frames=self._frames,
            num_frames=self._num_frames,
            num_bytes=self._num_bytes,
            wire_bytes=self._wire_bytes,
        )


def _fd(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:  # Not every transport has one.
        return -1
