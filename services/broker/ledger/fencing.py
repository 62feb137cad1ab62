"""Who is connected: sessions, their sequence numbers, what they last said of themselves.

A newer session of a rollout fences the older ones of that name: they are lives of one process. Learners are not: the run
belongs to the one that has it for as long as it lives, and lives as long as it is heard.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from protocol.delivery import Inbox
from protocol.limits import MAX_PEERS
from protocol.messages import Heartbeat, Role
from services.broker.ledger.actions import Who

MAX_FENCED: Final = 1024
SILENT_S: Final = 300.0
"""A rollout or operator that says nothing for so long is forgotten; it says Hello when it comes back."""


LEARNER_LEASE_S: Final = 5.0
"""A learner that was heard within so many seconds, on the clock of a broker that listened, has the run to itself."""
LISTENING_S: Final = 2.0
"""Between two events more than this: the broker was not listening (a disk that refuses, a stopped process)."""


class SessionRefused(ValueError):
    """This session cannot be taken; the text goes to the peer, who must not try again."""


class PlaceTaken(ValueError):
    """Another learner has the run; the text goes to the peer, who may try again."""


@dataclass(kw_only=True)
class Peer:
    """One session and what is known of it."""

    who: Who
    role: Role
    inbox: Inbox
    last_seen: float
    status: str = ""
    policy_version: int = 0


class Peers:
    """Sessions by (peer, session). One learner at a time; one session per rollout name; operators as many as come."""

    def __init__(self, now: float, learner: Who | None = None) -> None:
        """``learner`` had the run under the last broker: it has the time of a lease to come back before another gets it."""
        self._peers: dict[Who, Peer] = {}
        self._fenced: deque[Who] = deque(maxlen=MAX_FENCED)
        self.learner = learner
        """Who has the run; None: nobody."""
        self.turned_away: tuple[Who, float] | None = None
        """The learner that was last told to wait, and when."""
        self._last_event = now
        self._listened_s = 0.0
        self._learner_heard_s = 0.0

    def listen(self, now: float) -> None:
        """Time has passed. A long gap does not count: what a learner said in it is still to be read."""
        passed = now - self._last_event
        self._last_event = now
        if passed <= LISTENING_S:
            self._listened_s += passed

    def hello(self, who: Who, role: Role, first_seq: int, now: float) -> list[Who]:
        """Open a session, or go on with it; returns the sessions that it replaces.

        Raises: SessionRefused for a session that was replaced already, or when there are too many peers; PlaceTaken for a
        learner while another one has the run.
        """
        if who in self._fenced:
            raise SessionRefused(
                f"session {who.session} of {who.peer} was replaced by a newer one: two processes use this name, or this "
                "learner was silent for too long and another took over; stop one of them"
            )
        peer = self._peers.get(who)
        if peer is not None:
            self.hear(peer, now)
            return []
        if len(self._peers) >= MAX_PEERS:
            raise SessionRefused(f"{len(self._peers)} peers are connected, {MAX_PEERS} allowed (MAX_PEERS)")
        replaced: list[Who] = []
        if role == "rollout":
            replaced = [peer.who for peer in self.of_role("rollout") if peer.who.peer == who.peer]
        elif role == "learner" and self.learner not in (None, who):
            assert self.learner is not None
            self._require_silence(self.learner, who, now)
            replaced = [self.learner]
        for other in replaced:
            self._peers.pop(other, None)
            self._fenced.append(other)
        peer = self._peers[who] = Peer(who=who, role=role, inbox=Inbox(first_seq), last_seen=now)
        if role == "learner":
            self.learner = who
        self.hear(peer, now)
        return replaced

    def _require_silence(self, holder: Who, who: Who, now: float) -> None:
        """Raises: PlaceTaken."""
        silent_s = self._listened_s - self._learner_heard_s
        if silent_s < LEARNER_LEASE_S:
            self.turned_away = (who, now)
            raise PlaceTaken(
                f"learner session {holder.session} ({holder.peer}) has this run and was heard {silent_s:.1f} s ago, and "
                f"there is one learner at a time: this one waits, and takes over when that one ends or says nothing for "
                f"{LEARNER_LEASE_S:g} s. If both were meant to train, give this one a broker and a run.directory of its own"
            )

    def hear(self, peer: Peer, now: float) -> None:
        """The session said something."""
        peer.last_seen = now
        if peer.who == self.learner:
            self._learner_heard_s = self._listened_s

    def hear_stranger(self, identity: bytes) -> None:
        """Somebody without a session spoke. After a restart of the broker that may be the learner that has the run: it
        lives, and will say Hello when it has been told to.
        """
        if self.learner is not None and identity == f"{self.learner.peer}/{self.learner.session}".encode():
            self._learner_heard_s = self._listened_s

    def get(self, who: Who) -> Peer | None:
        return self._peers.get(who)

    def heartbeat(self, who: Who, heartbeat: Heartbeat) -> None:
        peer = self._peers[who]
        peer.status = heartbeat.status
        peer.policy_version = heartbeat.policy_version

    def leave(self, who: Who) -> None:
        """The session has ended by itself."""
        del self._peers[who]
        if who == self.learner:
            self.learner = None

    def of_role(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == role]

    def prune(self, now: float) -> list[Who]:
        """Forget who is silent; a learner may be, while it trains."""
        gone = [peer.who for peer in self._peers.values() if peer.role != "learner" and now - peer.last_seen > SILENT_S]
        for who in gone:
            del self._peers[who]
        return gone
