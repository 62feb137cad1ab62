"""Who is connected: sessions, their sequence numbers, what they last said of themselves. A newer one fences older ones."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from protocol.delivery import Inbox
from protocol.limits import MAX_PEERS
from protocol.messages import Heartbeat, Role
from services.broker.actions import Who

MAX_FENCED: Final = 1024
SILENT_S: Final = 300.0
"""A rollout or operator that says nothing for so long is forgotten; it says Hello when it comes back."""


class SessionRefused(ValueError):
    """This session cannot be taken; the text goes to the peer, who must not try again."""


@dataclass(kw_only=True)
class Peer:
    """One session and what is known of it."""

    who: Who
    role: Role
    inbox: Inbox
    last_seen: float
    status: str = ""
    policy_version: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Peers:
    """Sessions by (peer, session). One learner at a time; one session per rollout name; operators as many as come."""

    def __init__(self) -> None:
        self._peers: dict[Who, Peer] = {}
        self._fenced: deque[Who] = deque(maxlen=MAX_FENCED)

    def hello(self, who: Who, role: Role, first_seq: int, now: float) -> list[Who]:
        """Open a session, or go on with it; returns the sessions that it replaces.

        Raises: SessionRefused for a session that was replaced already, or when there are too many peers.
        """
        if who in self._fenced:
            raise SessionRefused(
                f"session {who.session} of {who.peer} was replaced by a newer one: two processes use this name, or a newer "
                "learner took over; stop one of them"
            )
        peer = self._peers.get(who)
        if peer is not None:
            peer.last_seen = now
            return []
        if len(self._peers) >= MAX_PEERS:
            raise SessionRefused(f"{len(self._peers)} peers are connected, {MAX_PEERS} allowed (MAX_PEERS)")
        replaced = [
            other.who
            for other in self._peers.values()
            if other.role == role and (role == "learner" or (role == "rollout" and other.who.peer == who.peer))
        ]
        for other in replaced:
            del self._peers[other]
            self._fenced.append(other)
        self._peers[who] = Peer(who=who, role=role, inbox=Inbox(first_seq), last_seen=now)
        return replaced

    def get(self, who: Who) -> Peer | None:
        return self._peers.get(who)

    def heartbeat(self, who: Who, heartbeat: Heartbeat) -> None:
        peer = self._peers[who]
        peer.status = heartbeat.status
        peer.policy_version = heartbeat.policy_version
        peer.metrics = dict(heartbeat.metrics)

    def leave(self, who: Who) -> None:
        """The session has ended by itself."""
        del self._peers[who]

    def of_role(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == role]

    def prune(self, now: float) -> list[Who]:
        """Forget who is silent; a learner may be, while it trains."""
        gone = [peer.who for peer in self._peers.values() if peer.role != "learner" and now - peer.last_seen > SILENT_S]
        for who in gone:
            del self._peers[who]
        return gone
