"""Turns what comes in through a socket into events of its session for the ledger, and knows how to reach each session."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Received, message_type
from gspo_protocol.limits import MAX_PEERS, PROTOCOL_VERSION
from gspo_protocol.messages import MESSAGE_TYPES, Chunk, Hello, LedgerCommit, Refused
from gspo_protocol.messages.base import shortened
from gspo_protocol.messages.gathered import Chunks, Gathered
from gspo_protocol.sessions import shown_identity
from gspo_services.broker.ledger import UNKNOWN_SESSION, Action, Ledger, Owner, Reply, SessionKey, TokenFacts
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.quotas import Buckets
from gspo_services.shared.net import Incoming, RouterChannel
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.logs import OccasionalLog

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One message and the socket that it came through."""

    spec: ChannelSpec
    incoming: Incoming

    @property
    def num_events(self) -> int:
        """What it counts for where a round's work is bounded: many chunks are as many."""
        received = self.incoming.received
        return received.message.num_chunks if received is not None and isinstance(received.message, Chunks) else 1


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a session is reached: over the connection on which it last said Hello."""

    spec: ChannelSpec
    identity: bytes
    key: bytes
    """The public key of the connection; empty without keys."""


class Answer(Action, frozen=True, kw_only=True):
    """A reply to a connection without a session."""

    spec: ChannelSpec
    identity: bytes
    message: Refused


class Sessions:
    """The sessions of the connections. A connection belongs to the session that was last welcomed over it."""

    def __init__(
        self,
        ledger: Ledger,
        channels: dict[ChannelSpec, RouterChannel],
        metrics: BrokerMetrics,
        clock: Clock,
        contradiction: Callable[[LedgerCommit], str],
    ) -> None:
        """``contradiction``: why the ledger does not continue the one that had this commit; empty when it may."""
        self._ledger = ledger
        self._channels = channels
        self._metrics = metrics
        self._contradiction = contradiction
        self._routes: dict[SessionKey, Route] = {}
        # By channel, identity and key: a sender claims its identity and proves its key. Each session has one.
        self._sessions: dict[tuple[str, bytes, bytes], SessionKey] = {}
        self._refusals = OccasionalLog(log, clock)
        # A connection without a session costs an answer to each message, which is all that it may cost.
        self._strangers: Buckets[tuple[str, bytes, bytes]] = Buckets(burst=64, per_s=4, most=MAX_PEERS)

    @property
    def num_routes(self) -> int:
        return len(self._routes)

    @property
    def num_connections(self) -> int:
        """Connections that belong to a session: at most one for each."""
        return len(self._sessions)

    def route(self, sender: SessionKey) -> Route | None:
        """How a session is reached; None: it is unknown, or no longer known."""
        return self._routes.get(sender)

    def actions(self, arrival: Arrival, now: float) -> list[Action]:
        """What the ledger decides about one arrival; what the ledger never sees is refused here."""
        received = arrival.incoming.received
        if received is None:
            return [self._undecodable(arrival)]
        self._metrics.messages.labels(message_type(received.message)).inc()
        if isinstance(received.message, Hello):
            return self._hello(arrival, received.message, now)
        return self._message(arrival, received, now)

    def gone(self) -> list[SessionKey]:
        """Sessions with a route that the ledger no longer knows."""
        return [sender for sender in self._routes if self._ledger.peers.get(sender) is None]

    def forget(self, gone: Iterable[SessionKey]) -> None:
        """Drop the routes to these sessions, except where one was welcomed again since."""
        for sender in gone:
            if self._ledger.peers.get(sender) is None:
                self._disconnect(sender)

    def count_refusal(self, sender: SessionKey, refused: Refused) -> None:
        """Count a Refused that is sent to a session."""
        label = "fatal" if refused.fatal else "unknown_session" if refused.reason == UNKNOWN_SESSION else "refused"
        self._count(refused.message_type, label, peer=sender.peer, reason=refused.reason)

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _hello(self, arrival: Arrival, hello: Hello, now: float) -> list[Action]:
        """A peer that is not welcomed takes nothing from the session that has its name: neither connection nor route."""
        objection = self._channels[arrival.spec].objection(arrival.incoming, hello)
        if objection:
            return [self._refuse(arrival, "hello", "fatal", f"hello: {objection}")]
        if hello.role not in arrival.spec.connects:
            reason = (
                f"hello: a {hello.role} does not belong on the {arrival.spec.name} channel, which is for "
                f"{' and '.join(arrival.spec.connects)}: check the endpoint"
            )
            return [self._refuse(arrival, "hello", "fatal", reason)]
        sender = SessionKey(hello.peer, hello.session)
        owner = Owner(arrival.incoming.key, self._channels[arrival.spec].key_name(arrival.incoming))
        objection = self._ledger.peers.objection(sender, hello.role, owner)
        if objection:
            self._channels[arrival.spec].count_impostor(hello, objection)
            return [self._refuse(arrival, "hello", "fatal", f"hello: {objection}")]
        objection = self._other_past(hello)
        if objection:
            return [self._refuse(arrival, "hello", "fatal", f"hello: {objection}")]
        actions = self._ledger.on_hello(hello, now, owner)
        if self._ledger.peers.get(sender) is None:
            return [self._without_session(arrival, sender, action) for action in actions]
        self._connect(arrival, sender)
        return actions

    def _other_past(self, hello: Hello) -> str:
        """Why a peer must not join, because of what it was told before; empty when it may.

        A copy of a run's directory has the run's identity and keys. A peer of the one broker that met the other's would mix
        two pasts. Releases and restored runs are told apart elsewhere.
        """
        run_id = self._ledger.state.config.run_id
        if hello.commit is None or hello.commit.run_id != run_id or hello.protocol_version != PROTOCOL_VERSION:
            return ""
        objection = self._contradiction(hello.commit)
        if not objection:
            return ""
        its_own = ", with the checkpoints that belong to it (run.directory)" if hello.role == "learner" else ""
        return (
            f"this broker's ledger is not the one that {hello.peer} knows of run {run_id}: {objection}. A copy of the run's "
            "directory is served beside the run, or an older copy was put in its place. End the broker that is not to go "
            f"on, and lead its address to the other one. To go on with this ledger, start {hello.peer} again{its_own}"
        )

    def _connect(self, arrival: Arrival, sender: SessionKey) -> None:
        """A session is reached over the connection on which it was welcomed last, and speaks over no other."""
        self._disconnect(sender)
        self._sessions[_key(arrival)] = sender
        self._routes[sender] = Route(spec=arrival.spec, identity=arrival.incoming.peer, key=arrival.incoming.key)

    def _disconnect(self, sender: SessionKey) -> None:
        former = self._routes.pop(sender, None)
        if former is None:
            return
        connection = (former.spec.name, former.identity, former.key)
        # Another session may have been welcomed over the same connection since.
        if self._sessions.get(connection) == sender:
            del self._sessions[connection]

    def _without_session(self, arrival: Arrival, sender: SessionKey, action: Action) -> Action:
        """The answer to a Hello that was not welcomed goes back over the connection that it came from."""
        if not isinstance(action, Reply) or not isinstance(action.message, Refused):
            return action
        self.count_refusal(sender, action.message)
        message = replace(action.message, session=sender.session)
        return Answer(spec=arrival.spec, identity=arrival.incoming.peer, message=message)

    def _message(self, arrival: Arrival, received: Received, now: float) -> list[Action]:
        kind = message_type(received.message)
        sender = self._sessions.get(_key(arrival))
        if sender is None:
            self._ledger.peers.hear_stranger(arrival.incoming.peer)
            self._channels[arrival.spec].unwanted(arrival.incoming)
            if not self._strangers.take(_key(arrival), now):
                self._metrics.refused.labels(kind, "unknown_session").inc()
                return []
            return [self._refuse(arrival, kind, "unknown_session", UNKNOWN_SESSION)]
        if not self._channels[arrival.spec].admits(arrival.incoming):
            return [self._refuse(arrival, kind, "fatal", "its key is not in the allow-list any more")]
        return self._ledger.on_message(sender, received.message, received.seq, now, token_facts(received))

    def _undecodable(self, arrival: Arrival) -> Answer:
        """Answer bytes that are no message with what is wrong with them.

        If they are next in their sender's sequence, they would be sent again for ever and nothing behind them could be
        taken: the sender must end, loudly.
        """
        incoming = arrival.incoming
        sender = self._sessions.get(_key(arrival))
        peer = None if sender is None else self._ledger.peers.get(sender)
        terminal = peer is not None and incoming.seq == peer.inbox.next_seq
        kind = incoming.message_type if incoming.message_type in MESSAGE_TYPES else ""
        return self._refuse(arrival, kind, "fatal" if terminal else "undecodable", incoming.error)

    def _refuse(self, arrival: Arrival, kind: str, label: str, reason: str) -> Answer:
        """Answer a connection that has no session."""
        name = shown_identity(arrival.incoming.peer)
        self._count(kind, label, peer=name, reason=reason, channel=arrival.spec.name)
        message = Refused(reason=shortened(reason), message_type=kind, fatal=label == "fatal")
        return Answer(spec=arrival.spec, identity=arrival.incoming.peer, message=message)

    def _count(self, kind: str, label: str, **fields: str) -> None:
        self._metrics.refused.labels(kind, label).inc()
        self._refusals.warning("message_refused", (kind, label), type=kind, **fields)


def token_facts(received: Received) -> TokenFacts | Gathered | None:
    """What the ledger must know of a chunk's tokens, or many chunks as they are read; None for any other message."""
    if isinstance(received.message, Chunks):
        return Gathered(received.arrays)
    if not isinstance(received.message, Chunk):
        return None
    return TokenFacts.of(received.arrays)


def _key(arrival: Arrival) -> tuple[str, bytes, bytes]:
    return arrival.spec.name, arrival.incoming.peer, arrival.incoming.key
