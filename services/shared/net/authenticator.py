"""Decides which peers may connect to a process: by their keys, the names they claim, and their behaviour.

Every refusal is counted by its reason and logged at a bounded rate. Only public keys of others are read here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, Literal, get_args

import structlog
import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator as ZapServer

from gspo_protocol import limits
from gspo_protocol.channels import ChannelSpec
from gspo_protocol.messages import Hello
from gspo_protocol.sessions import shown_identity
from gspo_services.shared.net.connections import Connections, Drain, Excess
from gspo_services.shared.net.penalties import Offender, Penalties
from gspo_services.shared.net.security import KEY_ROLES, AllowList, KeyFileError, Security, read_public_keys
from gspo_services.shared.net.watch import ConnectionWatch, break_off
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.logs import OccasionalLog

log = structlog.get_logger()

Reason = Literal["unknown_key", "wrong_role", "handshake", "impostor", "bad_messages", "flood", "excess", "shut_out"]
AUTHENTICATOR_REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
"""unknown_key: not in the allow-list. wrong_role: listed, but not for this channel. handshake: no key, not ZeroMQ, or broken
off. impostor: an admitted key claimed another role, name or session. bad_messages: undecodable ones, or too many Hellos; its
sender is ignored for a while. flood: far more messages than its credit. excess: a message without an end, or more unread
bytes than its credit. shut_out: it came back too soon after one of these."""

RELOAD_S: Final = 2.0
HANDSHAKE_LIMIT_MS: Final = 10_000
ADMITTED_MEMORY: Final = 1024
WATCHED: Final = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True, kw_only=True)
class AuthenticatorCounters:
    """The authenticator's counters.

    ``connections`` gets "accepted" (TCP) and "admitted" (the handshake passed). A client that does not speak ZeroMQ is
    accepted but never admitted.
    """

    refused: Callable[[Reason], None]
    connections: Callable[[Literal["accepted", "admitted"]], None]


class Authenticator:
    """Guards the binding sockets of one process; one per ZeroMQ context.

    produces:     answers to handshakes, counts
    waits for:    connections; changes of the key directory, which is read every ``reload_s``
    unblocked by: peers; time
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        security: Security,
        clock: Clock,
        counters: AuthenticatorCounters,
        *,
        reload_s: float = RELOAD_S,
    ) -> None:
        """Raises: KeyFileError."""
        self._security = security
        self._clock = clock
        self._counters = counters
        self._reload_s = reload_s
        self._monitored: list[zmq.asyncio.Socket] = []
        self._monitors: list[Any] = []
        self._penalties = Penalties()
        self._hellos = Penalties(limits.HELLOS_BURST, limits.HELLOS_PER_S)
        self._floods = Penalties(limits.UNWANTED_BURST, limits.UNWANTED_PER_S)
        self._watch_thread = ConnectionWatch(self._on_event, self._on_excess)
        self._admitted: deque[tuple[float, bytes]] = deque(maxlen=ADMITTED_MEMORY)
        self._refusals = OccasionalLog(log, clock)
        self._roles: dict[str, tuple[str, ...]] = {}
        self._zap: ZapServer | None = None
        self._allowed = AllowList({})
        if security.own is not None:
            assert security.directory is not None
            self._allowed.replace(read_public_keys(security.directory))
            # ZAP (ZeroMQ's authentication) has one address per context. It is bound before the sockets that ask there.
            self._zap = ZapServer(context)
            self._zap.start()

    @property
    def secure(self) -> bool:
        return self._zap is not None

    def guard(self, socket: zmq.asyncio.Socket, spec: ChannelSpec, drain: Drain, max_message_bytes: int) -> Connections:
        """Give ``socket`` this process's key, and watch its handshakes and its connections. Call this before the socket is
        bound. ``drain``: what reads it; ``max_message_bytes``: of the largest honest message. Returns its connections.
        """
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        if self._zap is not None:
            own = self._security.own
            assert own is not None
            self._roles[spec.name] = spec.connects
            self._zap.configure_curve_callback(spec.name, credentials_provider=self)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, spec.name)
            # Without this, a process whose ZAP handler is gone would admit every key.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        connections = Connections(
            channel=spec.name, max_unfinished=max_message_bytes, max_held=limits.WINDOW_BYTES + max_message_bytes
        )
        monitor = socket.get_monitor_socket(WATCHED)
        self._watch_thread.add(connections, drain, monitor)
        self._monitors.append(monitor)
        self._monitored.append(socket)
        return connections

    async def run(self) -> None:
        """Answer and watch until cancelled, then close. The guarded sockets may be closed before or after."""
        self._watch_thread.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.Event().wait(), name="authenticator")
                if self._zap is not None:
                    tasks.create_task(self._authenticate(self._zap), name="authenticator-keys")
                    tasks.create_task(self._reload(), name="authenticator-reload")
        finally:
            self.close()

    def close(self) -> None:
        """Release the monitors and the ZAP address. A second call does nothing."""
        self._watch_thread.stop()
        for monitor, socket in zip(self._monitors, self._monitored, strict=True):
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors.clear()
        self._monitored.clear()
        if self._zap is not None:
            self._zap.stop()
            self._zap = None

    # --- admission ---------------------------------------------------------------------------------------------

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of ``key`` (Z85) may use the channel ``domain``; pyzmq's authenticator calls this."""
        now = self._clock.now()
        if self._penalties.active and self._penalties.ignores(("key", key), now):
            self.refuse("shut_out", channel=domain, key=self._allowed.name(key))
            return False
        if self._allowed.admits(key, self._roles[domain]):
            self._admitted.append((time.monotonic(), key))
            return True
        name = self._allowed.name(key)
        self.refuse("wrong_role" if name else "unknown_key", channel=domain, key=name or key.decode())
        return False

    def objection(self, key: bytes, hello: Hello) -> str:
        """Say why the peer that sent ``hello`` over a connection with ``key`` must not be welcomed; empty when it may be."""
        if not self.secure:
            return ""
        return self._allowed.objection(key, hello.role, hello.peer)

    def endpoint_objection(self, endpoint: str) -> str:
        """Say why ``endpoint`` must not be bound; empty when it may be."""
        return self._security.objection(endpoint)

    def key_name(self, key: bytes) -> str:
        """Return the name of a key in the allow-list; empty when it is not listed, and without keys."""
        return self._allowed.name(key)

    def lists(self, key: bytes) -> bool:
        """Return whether a connection's key is (still) in the allow-list. Without keys every peer is listed."""
        return not self.secure or bool(self._allowed.name(key))

    async def _authenticate(self, zap: ZapServer) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(zap.zap_socket, zmq.POLLIN)
        while True:
            await poller.poll()
            await zap.handle_zap_message(zap.zap_socket.recv_multipart(zmq.NOBLOCK))

    async def _reload(self) -> None:
        """Follow the directory: a new file admits a new peer; a removed one has its owner refused at the next message."""
        directory = self._security.directory
        assert directory is not None
        former: dict[bytes, str] | None = None
        error = ""
        while True:
            try:
                names = await asyncio.to_thread(read_public_keys, directory)
            except KeyFileError as broken:
                if str(broken) != error:
                    log.error("allow_list_kept", error=str(broken))
                error = str(broken)
            else:
                error = ""
                if names != former:
                    log.info(
                        "allow_list_loaded", directory=str(directory), names=sorted(names.values())[:64], number=len(names)
                    )
                    self._allowed.replace(names)
                    former = names
            await asyncio.sleep(self._reload_s)

    # --- refusals --------------------------------------------------------------------------------------------------

    def refuse(self, reason: Reason, /, **fields: object) -> None:
        """Count a refusal, and log it unless one with the same reason was logged recently."""
        self._counters.refused(reason)
        self._refusals.warning("connection_refused", reason, reason=reason, **fields)

    def _on_event(self, connections: Connections, event: int, paused: bool) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._counters.connections("accepted")
            if paused:
                self.refuse("shut_out", channel=connections.channel)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._counters.connections("admitted")
        elif event != zmq.EVENT_DISCONNECTED:
            self.refuse("handshake", channel=connections.channel)

    # --- penalties ----------------------------------------------------------------------------------------------------

    def bad_message(self, spec: ChannelSpec, peer: bytes, key: bytes = b"") -> None:
        """Count an undecodable message of ``peer``. A peer that sends too many is ignored for a while."""
        self._offend(self._penalties, spec, peer, key)

    def on_hello(self, spec: ChannelSpec, peer: bytes, key: bytes = b"") -> None:
        """Count a Hello of ``peer``. Far more of them than honest peers send are an offence."""
        self._offend(self._hellos, spec, peer, key)

    def _offend(self, penalties: Penalties, spec: ChannelSpec, peer: bytes, key: bytes) -> None:
        now = self._clock.now()
        offender = self._offender(spec.name, peer, key)
        if penalties.offend(offender, now):
            self._penalties.shut_out(offender, now, limits.IGNORED_S)
            name = self._allowed.name(key)
            self.refuse("bad_messages", channel=spec.name, peer=shown_identity(peer), key=name, ignored_s=limits.IGNORED_S)

    def unwanted(self, spec: ChannelSpec, peer: bytes, key: bytes, connections: Connections | None) -> None:
        """Count a message of ``peer`` without credit or session: honest peers send a few of these, and their whole window
        again and again while the disk is full. One that floods has its connection broken, and is shut out.
        """
        now = self._clock.now()
        offender = self._offender(spec.name, peer, key)
        if not self._floods.offend(offender, now):
            return
        self._penalties.shut_out(offender, now, limits.IGNORED_S)
        self.refuse("flood", channel=spec.name, peer=shown_identity(peer), key=self._allowed.name(key))
        if connections is None:
            return
        for connection in list(connections.by_fd.values()):
            if connection.peer == peer:
                break_off(connection.fd, connection.address)
                self._pause(connections, connection.address[0])

    def ignores(self, spec: ChannelSpec, peer: bytes, key: bytes = b"") -> bool:
        """Return whether messages of ``peer`` are now discarded unread."""
        if not self._penalties.active:
            return False
        return self._penalties.ignores(self._offender(spec.name, peer, key), self._clock.now())

    def _offender(self, channel: str, peer: bytes, key: bytes) -> Offender:
        """Return who is responsible for a connection: the owner of its own key, otherwise only the connection itself."""
        name = self._allowed.name(key)
        return ("key", key) if name and name not in KEY_ROLES else (channel, peer)

    def _on_excess(self, connections: Connections, excess: Excess) -> None:
        """A connection was broken: its key is shut out, or its host if no key names one process alone."""
        now, connection = self._clock.now(), excess.connection
        key = connection.key or self._key_since(connection.since)
        name, host = self._allowed.name(key), connection.address[0]
        self.refuse(
            "excess",
            channel=connections.channel,
            address=f"{host}:{connection.address[1]}",
            peer=shown_identity(connection.peer),
            key=name,
            held_bytes=connection.held,
            excess=excess.reason,
        )
        if name and name not in KEY_ROLES:
            self._penalties.shut_out(("key", key), now, limits.SHUT_OUT_S)
        self._pause(connections, host, seconds=0.0 if name or ip_address(host).is_loopback else limits.SHUT_OUT_S)

    def _pause(self, connections: Connections, host: str, seconds: float = 0.0) -> None:
        """Accept no new connection from ``host`` until its unread data has been read; its open connections stay."""
        self._watch_thread.pause(connections, host, max(seconds, limits.PAUSE_S))

    def _key_since(self, since: float) -> bytes:
        """Return the key of a connection made at ``since`` that sent no whole message, if only one was admitted since."""
        keys = {key for at, key in self._admitted if at >= since}
        return keys.pop() if len(keys) == 1 else b""
