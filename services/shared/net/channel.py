"""The ZeroMQ ends of a channel: RouterChannel binds and serves many peers, DealerChannel connects to one.

Both carry only protocol messages. An undecodable message becomes an ``Incoming`` with an error, never an exception, so that
one bad peer cannot end the service. Sends never block the loop: they report a peer that is gone or has a full queue, and
the caller keeps what must arrive (``gspo_protocol.delivery``) and sends it again.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gspo_protocol import limits
from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Array, Frame, Received, decode, encode
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Hello, Message
from gspo_services.shared.net.authenticator import Authenticator
from gspo_services.shared.net.connections import Connections
from gspo_services.shared.net.frames import MAX_IDENTITY_BYTES, FrameReader, WireParts, whole
from gspo_services.shared.net.security import PLAINTEXT, KeyFileError, Security
from gspo_services.shared.runtime.errors import EndpointError

LINGER_MS: Final = 2000
RECONNECT_PAUSE_S: Final = 1.0
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 3
KEEPALIVE_COUNT: Final = 4
UNACKNOWLEDGED_MS: Final = 20_000
"""TCP gives up a connection when the other host has acknowledged nothing for this long."""
HANDSHAKES: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A received message, or why it could not be decoded.

    ``key`` is the public key (Z85) that the connection was admitted with; empty without keys. ``message_type`` and ``seq``
    are set for an undecodable message: what its header claims.
    """

    peer: bytes
    received: Received | None
    error: str = ""
    key: bytes = b""
    num_bytes: int = 0
    message_type: str = ""
    seq: int | None = None


def _configure(socket: zmq.asyncio.Socket, spec: ChannelSpec, *, frame_bytes: int) -> None:
    """Set the options of both ends.

    libzmq 4.3.5 aborts the process when it sends a heartbeat, its own or the answer to a peer's, over a connection that was
    reset while its input was stopped (``Assertion failed: !_io_error``). So there are no heartbeats of ZeroMQ: dead
    connections are found by TCP and by our own messages. And input is never stopped: the receiving queue has no bound here.
    """
    socket.setsockopt(zmq.SNDHWM, spec.high_water_mark)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes + limits.CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)


def _reason(error: zmq.ZMQError) -> str:
    """Return libzmq's text for its error, without the endpoint that pyzmq appends to some."""
    return str(error) if error.errno is None else str(zmq.strerror(error.errno))


def _decode(parts: WireParts) -> Incoming:
    if parts.num_frames > limits.MAX_FRAMES:
        error = ProtocolError(f"message has {parts.num_frames} frames, 1 to {limits.MAX_FRAMES} allowed (MAX_FRAMES)")
    elif len(parts.peer) > MAX_IDENTITY_BYTES:
        error = ProtocolError(f"identity has {len(parts.peer)} bytes, {MAX_IDENTITY_BYTES} allowed (MAX_IDENTITY_BYTES)")
    else:
        try:
            received = decode(parts.frames)
        except ProtocolError as refused:
            error = refused
        else:
            return Incoming(peer=parts.peer, received=received, key=parts.key, num_bytes=parts.num_bytes)
    return Incoming(
        peer=parts.peer[:MAX_IDENTITY_BYTES],
        received=None,
        error=str(error),
        key=parts.key,
        num_bytes=parts.num_bytes,
        message_type=error.message_type,
        seq=error.seq,
    )


class RouterChannel:
    """The binding end. An identity belongs to one connection at a time; a second connection with it is ignored."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        spec: ChannelSpec,
        endpoint: str,
        authenticator: Authenticator | None = None,
        *,
        max_message_bytes: int = 0,
    ) -> None:
        """Bind. ``authenticator`` decides, while it runs, which peers may connect; None: any peer on this host.
        ``max_message_bytes``: of the largest honest message; 0: the channel's own limit.

        Raises: EndpointError when the endpoint is malformed, in use, or open to other hosts without keys.
        """
        if "," in endpoint:
            raise EndpointError(
                f"{spec.name} channel: {endpoint!r} has several addresses, and a broker binds one: give each its own, as "
                f"with --set broker.{spec.name}_endpoint={endpoint.partition(',')[0]}"
            )
        objection = PLAINTEXT.objection(endpoint) if authenticator is None else authenticator.endpoint_objection(endpoint)
        if objection:
            raise EndpointError(f"{spec.name} channel: {objection}")
        self._spec = spec
        self._authenticator = authenticator
        self._connections: Connections | None = None
        self._socket = context.socket(zmq.ROUTER)
        self._reader = FrameReader(self._socket, secure=authenticator is not None and authenticator.secure)
        _configure(self._socket, spec, frame_bytes=spec.max_frame_bytes_in)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # No handover of an identity: the former connection would stay open without a reader, which stops its input.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if authenticator is not None:
            max_message_bytes = min(max_message_bytes or spec.max_message_bytes_in, spec.max_message_bytes_in)
            self._connections = authenticator.guard(self._socket, spec, self._reader, max_message_bytes)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise EndpointError(
                f"{spec.name} channel: cannot bind {endpoint}: {_reason(error)}. Is another run using it? "
                f"Choose another port in the configuration or stop that process"
            ) from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def objection(self, incoming: Incoming, hello: Hello) -> str:
        """Say why the sender of ``hello`` must not be welcomed, and count it; empty when it may be."""
        if self._authenticator is None:
            return ""
        objection = self._authenticator.objection(incoming.key, hello)
        if objection:
            self.count_impostor(hello, objection)
        return objection

    def count_impostor(self, hello: Hello, objection: str) -> None:
        """Count and log that an admitted peer claimed in ``hello`` to be another."""
        if self._authenticator is not None:
            self._authenticator.refuse(
                "impostor", channel=self._spec.name, claimed=hello.peer, role=hello.role, objection=objection
            )

    def key_name(self, incoming: Incoming) -> str:
        """Return the name, in the allow-list, of a connection's key; empty without keys."""
        return "" if self._authenticator is None else self._authenticator.key_name(incoming.key)

    def admits(self, incoming: Incoming) -> bool:
        """Return whether the key of a message's connection is (still) in the allow-list."""
        return self._authenticator is None or self._authenticator.lists(incoming.key)

    async def receive(self) -> Incoming:
        """Wait for the next message of any peer. Messages of an ignored peer are discarded unread."""
        while True:
            parts = await self._reader.read()
            if self._authenticator is None or self._connections is None:
                return _decode(parts)
            self._connections.delivered(parts.fd, parts.wire_bytes, parts.peer, parts.key)
            if self._authenticator.ignores(self._spec, parts.peer, parts.key):
                continue
            incoming = _decode(parts)
            if incoming.received is None:
                self._authenticator.bad_message(self._spec, parts.peer, parts.key)
            elif isinstance(incoming.received.message, Hello):
                self._authenticator.on_hello(self._spec, parts.peer, parts.key)
            elif incoming.received.seq is None:
                self.unwanted(incoming)
            return incoming

    def unwanted(self, incoming: Incoming) -> None:
        """A message that needs no credit, or for which its sender had none, or no session. Honest peers send few of them; a
        sender of too many is shut out.
        """
        if self._authenticator is not None:
            self._authenticator.unwanted(self._spec, incoming.peer, incoming.key, self._connections)

    async def send(
        self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None, *, unchanging: bool = False
    ) -> bool:
        """Send. Returns False when the peer is gone or its queue is full; then nothing was sent.

        ``unchanging``: nobody changes the arrays while somebody refers to them, so that they are sent from where they lie: a
        copy takes several times as long as the rest.
        """
        return await self._send_frames(peer, encode(message, arrays), copy=not unchanging)

    async def send_to_each(self, peers: Iterable[bytes], message: Message) -> list[bytes]:
        """Send one message, encoded once, to several peers. Returns those that are gone or have a full queue."""
        frames = encode(message)
        return [peer for peer in peers if not await self._send_frames(peer, frames)]

    async def _send_frames(self, peer: bytes, frames: Sequence[Frame], *, copy: bool = True) -> bool:
        try:
            await self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=copy)
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
    """The connecting end, which reconnects by itself. ``identity`` is what the other end calls this process."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        spec: ChannelSpec,
        endpoint: str,
        identity: str,
        security: Security = PLAINTEXT,
    ) -> None:
        """Connect.

        Raises: EndpointError when the endpoint is malformed or open to other hosts without keys, or when the public key of
        its binding end is missing.
        """
        objection = security.objection(endpoint)
        if objection:
            raise EndpointError(f"{spec.name} channel: {objection}")
        self._spec = spec
        self._endpoint = endpoint
        self._security = security
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, spec, frame_bytes=limits.MAX_FRAME_BYTES)
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # Before the first attempt: a refusal is reported once, and libzmq does not try again after it.
        self._monitor = self._socket.get_monitor_socket(HANDSHAKES)
        try:
            self._use_key()
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(linger_ms=0)
            raise EndpointError(f"{spec.name} channel: cannot connect to {endpoint!r}: {_reason(error)}") from error
        except KeyFileError as error:
            self.close(linger_ms=0)
            raise EndpointError(f"{spec.name} channel: cannot connect to {endpoint!r}: {error}") from error

    def _use_key(self) -> None:
        own = self._security.own
        if own is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._security.server_key(self._spec.binds))
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)

    def connect_again(self, identity: str, endpoint: str = "") -> None:
        """Give up the connection, which may be dead without a sign, and make another under a new identity: the other end may
        not know yet that the former one is dead. What was on its way is lost. ``endpoint``: to another address.
        """
        self._socket.setsockopt_string(zmq.IDENTITY, identity)
        self._socket.disconnect(self._endpoint)
        self._endpoint = endpoint or self._endpoint
        self._socket.connect(self._endpoint)

    async def handshakes(self) -> AsyncGenerator[str | None, None]:
        """Yield how each attempt to connect ends: "" when we are admitted, otherwise why not and what to do. None: the
        connection over which we were admitted is lost.

        libzmq gives up for good when the other end refuses. After a pause it is told to try again.
        """
        admitted = False
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                if admitted:
                    yield None
                admitted = False
                continue
            admitted = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            yield self._outcome(event)
            if event["event"] in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                await asyncio.sleep(RECONNECT_PAUSE_S)
                self._socket.disconnect(self._endpoint)
                self._socket.connect(self._endpoint)

    def _outcome(self, event: Mapping[str, Any]) -> str:
        """Say what an event of the socket's monitor means."""
        own, binds = self._security.own, self._spec.binds
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return ""
        where = f"the {binds} at {self._endpoint}"
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert own is not None
            return (
                f"{where} refused the key {own.name} ({own.public.decode()}): put {own.name}.public into its security.keys "
                f"directory; only keys of {' and '.join(self._spec.connects)} may use this channel"
            )
        if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if own is None:
                return f"{where} asks for a key and this process has none: set security.keys"
            return f"{where} uses no keys and this process does: set security.keys there as well"
        if own is None:
            return f"{where} breaks off the handshake: if it asks for a key, set security.keys; is it this run's {binds}?"
        return (
            f"{where} breaks off the handshake: is {binds}.public in {self._security.directory} its public key, and does it "
            "use keys at all?"
        )

    async def receive(self) -> Incoming:
        """Wait for the next message."""
        frames = await self._socket.recv_multipart()
        return _decode(whole(frames))

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None, seq: int | None = None) -> bool:
        """Send. Returns False when the queue to the peer is full (it is away or slow); then nothing was sent."""
        return await self.send_frames(encode(message, arrays, seq))

    async def send_frames(self, frames: Sequence[Frame]) -> bool:
        """Send a message that is encoded already; returns what ``send`` does."""
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close. Messages that are still queued get ``linger_ms`` to leave."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
