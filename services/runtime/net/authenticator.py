"""Decides which peers may connect to a process: by their keys, by the names they claim, and by how they behave.

Every refusal is counted by its reason and logged at a bounded rate. Only public keys of others are read here.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator as ZapServer
from zmq.utils.monitor import parse_monitor_message

from protocol import limits
from protocol.channels import ChannelSpec
from protocol.messages import Hello
from protocol.sessions import shown_identity
from services.runtime.clock import Clock
from services.runtime.logs import OccasionalLog
from services.runtime.net.security import AllowList, KeyFileError, Security, read_public_keys

log = structlog.get_logger()

Reason = Literal["unknown_key", "wrong_role", "handshake", "impostor", "bad_messages"]
AUTHENTICATOR_REASONS: Final[tuple[Reason, ...]] = ("unknown_key", "wrong_role", "handshake", "impostor", "bad_messages")
"""unknown_key: not in the allow-list. wrong_role: listed, but not for this channel. handshake: no key, not ZeroMQ, or broken
off. impostor: an admitted key claimed another role, name or session. bad_messages: the connection is ignored for a while."""

RELOAD_S: Final = 2.0
HANDSHAKE_LIMIT_MS: Final = 10_000
WATCHED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True, kw_only=True)
class AuthenticatorCounters:
    """Where the authenticator counts.

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
        self._monitors: list[tuple[ChannelSpec, Any]] = []
        self._penalties = Penalties()
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

    def guard(self, socket: zmq.asyncio.Socket, spec: ChannelSpec) -> None:
        """Give ``socket`` this process's key and watch its handshakes. Call this before the socket is bound."""
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
        self._monitors.append((spec, socket.get_monitor_socket(WATCHED)))
        self._monitored.append(socket)

    async def run(self) -> None:
        """Answer and watch until cancelled, then close. The guarded sockets may be closed before or after."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for spec, monitor in self._monitors:
                    tasks.create_task(self._watch(spec, monitor), name=f"authenticator-{spec.name}")
                if self._zap is not None:
                    tasks.create_task(self._authenticate(self._zap), name="authenticator-keys")
                    tasks.create_task(self._reload(), name="authenticator-reload")
        finally:
            self.close()

    def close(self) -> None:
        """Release the monitors and the ZAP address. A second call does nothing."""
        for (_, monitor), socket in zip(self._monitors, self._monitored, strict=True):
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
        """Whether the owner of ``key`` (Z85) may use the channel ``domain``; pyzmq's authenticator asks this."""
        if self._allowed.admits(key, self._roles[domain]):
            return True
        name = self._allowed.name(key)
        self.refuse("wrong_role" if name else "unknown_key", channel=domain, key=name or key.decode())
        return False

    def objection(self, key: bytes, hello: Hello) -> str:
        """Why the peer that sent ``hello`` over a connection with ``key`` must not be welcomed; empty when it may be."""
        if not self.secure:
            return ""
        return self._allowed.objection(key, hello.role, hello.peer)

    def endpoint_objection(self, endpoint: str) -> str:
        """Why ``endpoint`` must not be bound; empty when it may be."""
        return self._security.objection(endpoint)

    def key_name(self, key: bytes) -> str:
        """The name of a key in the allow-list; empty when it is not listed, and without keys."""
        return self._allowed.name(key)

    def lists(self, key: bytes) -> bool:
        """Whether a connection's key is (still) in the allow-list. Without keys every peer is listed."""
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
        """Count a refusal, and log it unless one with the same reason was logged lately."""
        self._counters.refused(reason)
        self._refusals.warning("connection_refused", reason, reason=reason, **fields)

    async def _watch(self, spec: ChannelSpec, monitor: Any) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._counters.connections("accepted")
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._counters.connections("admitted")
            else:
                self.refuse("handshake", channel=spec.name)

    # --- penalties ----------------------------------------------------------------------------------------------------

    def bad_message(self, spec: ChannelSpec, peer: bytes) -> None:
        """Count an undecodable message of ``peer``. A peer that sends too many is ignored for a while."""
        if self._penalties.offend((spec.name, peer), self._clock.now()):
            self.refuse("bad_messages", channel=spec.name, peer=shown_identity(peer), ignored_s=limits.IGNORED_S)

    def ignores(self, spec: ChannelSpec, peer: bytes) -> bool:
        """Whether messages of ``peer`` are now thrown away unread."""
        return self._penalties.active and self._penalties.ignores((spec.name, peer), self._clock.now())


class Penalties:
    """Counts bad messages of each peer, which are forgiven over time. A peer with more than a burst is ignored. Pure."""

    def __init__(self) -> None:
        self._offenders: OrderedDict[tuple[str, bytes], tuple[float, float]] = OrderedDict()
        self._ignored: dict[tuple[str, bytes], float] = {}

    @property
    def active(self) -> bool:
        return bool(self._ignored)

    def offend(self, peer: tuple[str, bytes], now: float) -> bool:
        """Count a bad message. Returns True when ``peer`` is ignored from now on, for IGNORED_S."""
        level, since = self._offenders.pop(peer, (0.0, now))
        level = max(0.0, level - (now - since) * limits.BAD_MESSAGES_PER_S) + 1
        if level > limits.BAD_MESSAGES_BURST:
            self._ignored[peer] = now + limits.IGNORED_S
            if len(self._ignored) > limits.MAX_PEERS:
                del self._ignored[next(iter(self._ignored))]
            return True
        self._offenders[peer] = (level, now)
        if len(self._offenders) > limits.MAX_PEERS:
            self._offenders.popitem(last=False)
        return False

    def ignores(self, peer: tuple[str, bytes], now: float) -> bool:
        until = self._ignored.get(peer)
        if until is None:
            return False
        if now < until:
            return True
        for other in [other for other, end in self._ignored.items() if end <= now]:
            del self._ignored[other]
        return False
