"""The connecting side of a channel: handshake, credit, redelivery, reconnection.

A PeerClient turns a DEALER socket into a connection that survives a restart of the other end. It says Hello until it is
welcomed, keeps every sequenced message until it is acknowledged, and sends all unacknowledged ones again after each new
handshake. A connection that no longer answers is replaced by a new one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import structlog
import zmq.asyncio

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Array, Frame, decode, encode, message_type
from gspo_protocol.delivery import Outbox
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    FOR_ONE_LIFE,
    SEQUENCED,
    Ack,
    AnyMessage,
    Goodbye,
    Hello,
    LedgerCommit,
    Message,
    Refused,
    Role,
    Welcome,
)
from gspo_protocol.sessions import connection_identity, session_tag
from gspo_services.shared.net.addresses import Addresses
from gspo_services.shared.net.channel import DealerChannel, Incoming
from gspo_services.shared.net.liveness import Liveness
from gspo_services.shared.net.security import PLAINTEXT, Security
from gspo_services.shared.net.welcome import require_expected, update_advice
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import OccupiedError, ReplacedError, ServiceError
from gspo_services.shared.runtime.logs import OccasionalLog

log = structlog.get_logger()

HELLO_INTERVAL_S: Final = 1.0
TICK_S: Final = 0.25
NUMBERS: Final = 1_000_000
"""Connections of one client, far more than it can make."""
MAX_REFUSED_HANDSHAKES: Final = 5
"""In a row, which takes about five seconds: time for somebody to give the other end our key."""
UNKNOWN_SESSION: Final = "unknown session"
"""The beginning of a Refused whose sender does not (or no longer) know our session."""

TURNED_AWAY_S: Final = 30.0
"""Hello is repeated for this long to an end that asks us to wait. Then OccupiedError ends the process."""
REPLACED: Final = "was replaced by a newer one"
"""A fatal Refused has this in its reason when another process has taken our place."""


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A message for the service, with its arrays."""

    message: AnyMessage
    arrays: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class _Unacknowledged:
    """A sequenced message as it is sent, however often that is needed."""

    message_type: str
    frames: Sequence[Frame]


class PeerClient:
    """A connection to the binding end of a channel.

    produces:     ``inbox``, the messages for the service; ``welcome``, the answer to the last handshake
    waits for:    the other end; credit (``send`` of a sequenced message waits while the window is full)
    unblocked by: Welcome; Ack
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        spec: ChannelSpec,
        endpoint: str,
        *,
        role: Role,
        peer: str,
        session: str,
        clock: Clock,
        fingerprint: str = "",
        security: Security = PLAINTEXT,
        number: int = 0,
        known: Callable[[], LedgerCommit | None] = lambda: None,
    ) -> None:
        """``endpoint``: several addresses, with commas between them, are a broker's and its standbys', of which one answers.
        ``session`` names this life of the process; ``fingerprint`` is what the run's settings must have (empty: any).
        ``number``: of the clients that the session had there before: the other end may not know yet that they are gone.
        ``known``: the newest commit of its ledger that a former life was told of, asked for until the first Welcome.

        Raises: EndpointError when the endpoint is malformed or must not be used without keys.
        """
        # Two processes of one name may exist at once. Under one identity the other end would answer only the one that
        # connected last, and the answers to the first would be lost.
        self._addresses = Addresses(spec, endpoint, security, clock)
        self._channel = DealerChannel(
            context, spec, self._addresses.current, connection_identity(peer, session, number * NUMBERS), security
        )
        self._spec = spec
        self._role: Role = role
        self._peer = peer
        self._session = session
        self._clock = clock
        self._fingerprint = fingerprint
        self._known = known
        self.commit: LedgerCommit | None = None
        """The newest commit of the other end's ledger that this end was told of."""
        self._outbox: Outbox[_Unacknowledged] = Outbox(spec.window, spec.resend_s)
        self._room = asyncio.Condition()
        self._welcomed = asyncio.Event()
        self._last_hello = -HELLO_INTERVAL_S
        self._hello_pause_s = HELLO_INTERVAL_S
        self._last_heard = clock.now()
        self._liveness = Liveness(clock.now())
        self._num_given_up = number * NUMBERS
        self._turned_away_at: float | None = None
        self._turned_away_s = 0.0
        self._warnings = OccasionalLog(log, clock)
        self.inbox: asyncio.Queue[Delivered] = asyncio.Queue(maxsize=spec.high_water_mark)
        self.welcome: Welcome | None = None
        self.num_handshakes = 0
        """How many handshakes succeeded. Each put its Welcome into the inbox."""
        self.refused = ""
        """Why the other end refuses us, and what to do; empty while it does not, or before it has answered."""

    @property
    def endpoint(self) -> str:
        """The address of the other end."""
        return self._addresses.current

    @property
    def num_unacknowledged(self) -> int:
        return self._outbox.num_unacked

    @property
    def num_acknowledged(self) -> int:
        """The number of sequenced messages acknowledged, from the first on."""
        return self._outbox.first_seq

    @property
    def silent_s(self) -> float:
        """Seconds since the other end was last heard."""
        return self._clock.now() - self._last_heard

    @property
    def connected(self) -> bool:
        return self._welcomed.is_set()

    async def run(self) -> None:
        """Keep the connection up until cancelled, then say Goodbye.

        Raises: ServiceError when the other end refuses us for good, or is not the one that was expected; its subclasses
        ReplacedError when another process has taken our place, and OccupiedError when another one has kept it for
        TURNED_AWAY_S.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(), name=f"{self._spec.name}-receive")
                tasks.create_task(self._tick(), name=f"{self._spec.name}-tick")
                tasks.create_task(self._watch_handshakes(), name=f"{self._spec.name}-handshakes")
        except asyncio.CancelledError:
            if self._welcomed.is_set():
                await self._channel.send(Goodbye())
            raise
        finally:
            self._channel.close()

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator["PeerClient"]:
        """Run as a task ``name`` inside the block, and close afterwards."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self.run(), name=name)
                try:
                    yield self
                finally:
                    running.cancel()
        finally:
            self.close()

    def close(self) -> None:
        """Also when ``run`` never began, or twice: libzmq would wait for ever to report to an abandoned monitor."""
        self._channel.close()

    async def connected_welcome(self) -> Welcome:
        """Wait for the handshake. Returns the other end's Welcome."""
        await self._welcomed.wait()
        assert self.welcome is not None
        return self.welcome

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Send. A sequenced message waits for credit and is kept until it is acknowledged; any other may be lost.

        Raises: ProtocolError for a message that no receiver would accept: kept, it would block the others for ever.
        """
        if not isinstance(message, SEQUENCED):
            if self._welcomed.is_set():
                self._liveness.sent()
                await self._channel.send(message, arrays)
            return
        async with self._room:
            await self._room.wait_for(lambda: self._outbox.has_room)
            frames = self._deliverable(message, arrays, self._outbox.next_seq)
            num_bytes = sum(memoryview(frame).nbytes for frame in frames)
            kept = _Unacknowledged(message_type=message_type(message), frames=frames)
            self._outbox.push(kept, self._clock.now(), num_bytes)
        if self._welcomed.is_set():
            self._liveness.sent()
            await self._channel.send_frames(frames)

    def _deliverable(
        self, message: Message, arrays: Mapping[str, Array] | None = None, seq: int | None = None
    ) -> Sequence[Frame]:
        """Encode a message that the other end can take. Raises: ProtocolError for any other."""
        frames = encode(message, arrays, seq)
        decode(frames)
        self._spec.require_taken(message_type(message), [memoryview(frame).nbytes for frame in frames])
        return frames

    async def flushed(self) -> None:
        """Wait until everything sequenced is acknowledged."""
        async with self._room:
            await self._room.wait_for(lambda: not self._outbox.num_unacked)

    async def acknowledged(self) -> None:
        """Wait until everything sequenced so far is acknowledged, whatever is sent meanwhile."""
        async with self._room:
            end = self._outbox.next_seq
            await self._room.wait_for(lambda: self._outbox.first_seq >= end)

    async def _receive(self) -> None:
        while True:
            incoming = await self._channel.receive()
            self._last_heard = self._clock.now()
            self._liveness.heard()
            self._addresses.heard()
            await self._handle(incoming)

    async def _watch_handshakes(self) -> None:
        """Log refused handshakes, which are silent on our side of the socket, and give up when they continue."""
        refusals = 0
        async with aclosing(self._channel.handshakes()) as handshakes:
            async for reason in handshakes:
                if reason is None:
                    # Not left to libzmq, which would keep the identity: the other end may not hear a second connection
                    # under it before it has read everything that came over the first one.
                    await self._connect_again()
                    continue
                refusals = refusals + 1 if reason else 0
                if reason and reason != self.refused:
                    log.warning("handshake_refused", channel=self._spec.name, reason=reason)
                self.refused = reason
                if refusals >= MAX_REFUSED_HANDSHAKES:
                    raise ServiceError(f"{self._spec.name} channel: {reason}")

    async def _handle(self, incoming: Incoming) -> None:
        if incoming.received is None:
            log.warning("message_ignored", channel=self._spec.name, error=incoming.error)
            return
        message = incoming.received.message
        if isinstance(message, FOR_ONE_LIFE) and message.session not in ("", self._session):
            # Its acknowledgements are not for us. Our identity holds our session, so the sender mixes sessions up.
            fields = {"type": message_type(message), "session": session_tag(message.session)}
            self._warnings.warning("message_for_another_session", "session", channel=self._spec.name, **fields)
        elif isinstance(message, Welcome):
            await self._on_welcome(message)
        elif isinstance(message, Ack):
            await self._on_ack(message)
        elif isinstance(message, Refused):
            await self._on_refused(message)
        else:
            await self.inbox.put(Delivered(message=message, arrays=incoming.received.arrays))

    async def _on_ack(self, ack: Ack) -> None:
        self._told(ack.commit)
        async with self._room:
            if self._outbox.acknowledge(ack.next_seq, self._clock.now()):
                self._room.notify_all()
        if ack.next_seq < self._outbox.first_seq and self._clock.now() - self._last_hello >= HELLO_INTERVAL_S:
            # It waits for messages that its former life has acknowledged: our Hello was older than these acknowledgements.
            await self._say_hello()

    async def _on_welcome(self, welcome: Welcome) -> None:
        require_expected(welcome, self._former_run, spec=self._spec, endpoint=self.endpoint, fingerprint=self._fingerprint)
        first = not self._welcomed.is_set()
        if first:
            log.info("connected", channel=self._spec.name, endpoint=self.endpoint, run_id=welcome.run_id)
        self.welcome = welcome
        self._told(welcome.commit)
        self.refused, self._turned_away_at, self._turned_away_s = "", None, 0.0
        self._hello_pause_s = HELLO_INTERVAL_S
        self._welcomed.set()
        if first:
            self.num_handshakes += 1
            await self._send_again(self._outbox.reconnected(self._clock.now()))
            # Once per handshake: Welcomes to Hellos repeated meanwhile would make the service ask for everything again.
            await self.inbox.put(Delivered(message=welcome, arrays={}))

    def _told(self, commit: LedgerCommit | None) -> None:
        if commit is not None and (self.commit is None or commit.number >= self.commit.number):
            self.commit = commit

    @property
    def _former_run(self) -> str:
        """The run that this process, or its former life, has something of; empty: none yet."""
        if self.welcome is not None:
            return self.welcome.run_id
        known = self._known()
        return "" if known is None else known.run_id

    async def _on_refused(self, refused: Refused) -> None:
        if refused.fatal:
            failure = ReplacedError if REPLACED in refused.reason else ServiceError
            more = update_advice(refused, self._role, self._peer, self._spec.binds)
            raise failure(f"{self._spec.name} channel: {self.endpoint} refused this process: {refused.reason}{more}")
        if refused.reason.startswith(UNKNOWN_SESSION):
            # Every message under way is refused so. One Hello answers them all; it is repeated while no Welcome comes.
            if self._welcomed.is_set():
                log.info("handshake_again", channel=self._spec.name, reason=refused.reason)
                self._welcomed.clear()
                await self._say_hello()
            return
        if refused.message_type == "hello":
            self._on_turned_away(refused)
            return
        log.warning("message_refused", channel=self._spec.name, type=refused.message_type, reason=refused.reason)
        await self.inbox.put(Delivered(message=refused, arrays={}))

    def _on_turned_away(self, refused: Refused) -> None:
        """The other end asks us to wait: Hello is repeated. Where time will help, there is no end to that."""
        now = self._clock.now()
        self.refused = reason = refused.reason
        self._warnings.warning("hello_refused", self._spec.name, channel=self._spec.name, reason=reason)
        if refused.retry_s:
            # It may also end a session, which is opened again when its time has come.
            self._welcomed.clear()
            self._hello_pause_s, self._turned_away_at, self._turned_away_s = refused.retry_s, None, 0.0
            return
        self._hello_pause_s = HELLO_INTERVAL_S
        if self._turned_away_at is not None:
            # Only a part of a long gap counts: a machine that was suspended has not asked meanwhile.
            self._turned_away_s += min(now - self._turned_away_at, 2 * HELLO_INTERVAL_S)
        self._turned_away_at = now
        if self._turned_away_s >= TURNED_AWAY_S:
            waited = f"refused this process for {self._turned_away_s:.0f} s"
            raise OccupiedError(f"{self._spec.name} channel: {self.endpoint} {waited}: {reason}")

    async def _tick(self) -> None:
        while True:
            now = self._clock.now()
            await self._look(now)
            if not self._welcomed.is_set():
                if now - self._last_hello >= self._hello_pause_s:
                    await self._say_hello()
            else:
                await self._send_again(self._outbox.due(now))
            await asyncio.sleep(TICK_S)

    async def _look(self, now: float) -> None:
        """Ask for a sign of life, or connect again, when the other end answers nothing."""
        if self.inbox.full():
            self._liveness.heard()  # Answers may be there: it is our service that takes none.
        verdict = self._liveness.look(now)
        if verdict == "connect_again":
            fields = {"endpoint": self.endpoint, "silent_s": round(now - self._last_heard, 1)}
            # Nobody has to be there yet while a run starts.
            level = "info" if self.welcome is None else "warning"
            self._warnings.log("connect_again", "silent", level, channel=self._spec.name, **fields)
            await self._connect_again()
        elif verdict == "ask" and self._welcomed.is_set():
            await self._say_hello()
        elif self._addresses.is_unanswered(now):
            await self._connect_again()

    async def _connect_again(self) -> None:
        """Make a new connection, to the next of several addresses, and open it with a handshake."""
        self._num_given_up += 1
        identity = connection_identity(self._peer, self._session, self._num_given_up)
        self._channel.connect_again(identity, self._addresses.next(self._clock.now()))
        self._welcomed.clear()
        await self._say_hello()

    async def _say_hello(self) -> None:
        self._last_hello = self._clock.now()
        self._liveness.sent()
        await self._channel.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                role=self._role,
                peer=self._peer,
                session=self._session,
                first_seq=self._outbox.first_seq,
                fingerprint=self._fingerprint,
                commit=self._known() if self.commit is None else self.commit,
            )
        )

    async def _send_again(self, pending: Sequence[tuple[int, _Unacknowledged]]) -> None:
        for _, kept in pending:
            if not await self._channel.send_frames(kept.frames):
                log.debug("resend_waits", channel=self._spec.name, type=kept.message_type)
                return
