"""ZeroMQ ends of a channel: RouterChannel binds and knows many peers, DealerChannel connects to one.

Both carry protocol messages only: what cannot be decoded becomes an ``Incoming`` with an error, never an exception, so that
one bad peer cannot end the service. Sends never block the loop: a peer whose queue is full or who is gone is reported to
the caller, who keeps what must arrive (``protocol.delivery``) and sends it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio

from protocol import limits
from protocol.channels import ChannelSpec
from protocol.codec import Array, Received, decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Message

LINGER_MS: Final = 2000


class EndpointError(RuntimeError):
    """An endpoint cannot be bound or connected; the text names it and the way out."""


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """What came in: a message, or the reason why it is none."""

    peer: bytes
    received: Received | None
    error: str = ""


def _configure(socket: zmq.asyncio.Socket, spec: ChannelSpec) -> None:
    socket.setsockopt(zmq.SNDHWM, spec.high_water_mark)
    socket.setsockopt(zmq.RCVHWM, spec.high_water_mark)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, spec.heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, spec.heartbeat_timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, spec.heartbeat_timeout_ms)


def _reason(error: zmq.ZMQError) -> str:
    """libzmq's words for its error, without the endpoint that pyzmq appends to some."""
    return str(error) if error.errno is None else str(zmq.strerror(error.errno))


def _decode(peer: bytes, frames: list[bytes]) -> Incoming:
    try:
        return Incoming(peer=peer, received=decode(frames))
    except ProtocolError as error:
        return Incoming(peer=peer, received=None, error=str(error))


class RouterChannel:
    """The binding end. A peer that comes back under the same identity takes over its former connection."""

    def __init__(self, context: zmq.asyncio.Context, spec: ChannelSpec, endpoint: str) -> None:
        """Bind. Raises: EndpointError when the endpoint is malformed or in use."""
        self._socket = context.socket(zmq.ROUTER)
        _configure(self._socket, spec)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise EndpointError(
                f"{spec.name} channel: cannot bind {endpoint}: {_reason(error)}. Is another run using it? "
                f"Choose another port in the configuration or stop that process"
            ) from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> Incoming:
        """The next message of any peer; waits for one."""
        peer, *frames = await self._socket.recv_multipart()
        return _decode(peer, frames)

    async def send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> bool:
        """False: the peer is gone or its queue is full; nothing was sent."""
        try:
            await self._socket.send_multipart([peer, *encode(message, arrays)], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        self._socket.close()


class DealerChannel:
    """The connecting end: one peer, reconnects by itself. ``identity`` is what the other end calls this process."""

    def __init__(self, context: zmq.asyncio.Context, spec: ChannelSpec, endpoint: str, identity: str) -> None:
        """Connect. Raises: EndpointError when the endpoint is malformed."""
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, spec)
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise EndpointError(f"{spec.name} channel: cannot connect to {endpoint!r}: {_reason(error)}") from error

    async def receive(self) -> Incoming:
        """The next message; waits for one."""
        return _decode(b"", await self._socket.recv_multipart())

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None, seq: int | None = None) -> bool:
        """False: the queue to the peer is full (it is away or slow); nothing was sent."""
        try:
            await self._socket.send_multipart(encode(message, arrays, seq), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
