"""Decides which session may use a peer's name, and which learner has the run; keeps what each session last reported.

A newer session of a rollout fences the older ones with that name: they are lives of one process. Learners are different: the
run belongs to its learner as long as that learner lives, and it lives as long as the broker hears it.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from protocol.delivery import Inbox
from protocol.limits import MAX_PEERS
from protocol.messages import Heartbeat, Role
from protocol.sessions import belongs
from services.broker.ledger.actions import SessionKey

MAX_FENCED: Final = 1024
SILENT_S: Final = 300.0
"""A rollout or operator that says nothing for this long is forgotten; it says Hello when it comes back."""
LEARNER_LEASE_S: Final = 5.0
"""A learner that was heard within this time has the run to itself; only time in which the broker listened counts."""
LISTENING_S: Final = 2.0
"""More than this between two events: the broker was not listening (a disk that refuses, a stopped process)."""


class SessionRefused(ValueError):
    """This session cannot be taken; the text goes to the peer, which must not try again."""


class PlaceTaken(ValueError):
    """Another learner has the run; the text goes to the peer, which may try again."""


@dataclass(kw_only=True)
class Peer:
    """One session and what is known about it."""

    key: SessionKey
    role: Role
    owner: bytes
    """The key that it proved when it first said Hello; empty without keys."""
    inbox: Inbox
    last_seen: float
    status: str = ""
    policy_version: int = 0


class Peers:
    """Sessions by (peer, session): one learner at a time, one session for each rollout name, any number of operators."""

    def __init__(self, now: float, learner: SessionKey | None = None) -> None:
        """``learner`` had the run under the last broker: it has the time of a lease to come back before another gets it."""
        self._peers: dict[SessionKey, Peer] = {}
        self._fenced: deque[SessionKey] = deque(maxlen=MAX_FENCED)
        self.learner = learner
        """The session that has the run; None: there is none."""
        self.turned_away: tuple[SessionKey, float] | None = None
        """The learner that was last told to wait, and when."""
        self._last_event = now
        self._listened_s = 0.0
        self._learner_heard_s = 0.0

    def listen(self, now: float) -> None:
        """Time has passed. A long gap does not count: what a learner sent in it is still to be read."""
        passed = now - self._last_event
        self._last_event = now
        if passed <= LISTENING_S:
            self._listened_s += passed

    def objection(self, sender: SessionKey, role: Role, owner: bytes) -> str:
        """Why the owner of a key must not speak for a session with this role; empty when it may.

        A session belongs for good to the role and the key that it first said Hello with.
        """
        peer = self._peers.get(sender)
        bound = peer.role if peer is not None else "learner" if sender == self.learner else role
        if role != bound:
            return f"session {sender.tag} of {sender.peer} belongs to the role {bound}, not to {role}"
        if peer is not None and owner != peer.owner:
            return f"session {sender.tag} of {sender.peer} belongs to another key"
        return ""

    def hello(self, sender: SessionKey, role: Role, first_seq: int, now: float, owner: bytes = b"") -> list[SessionKey]:
        """Open a session, or continue it; returns the sessions that it replaces.

        Raises: SessionRefused for a session that was replaced already or belongs to another, or when there are too many
        peers; PlaceTaken for a learner while another one has the run.
        """
        objection = self.objection(sender, role, owner)
        if objection:
            raise SessionRefused(objection)
        if sender in self._fenced:
            raise SessionRefused(
                f"session {sender.tag} of {sender.peer} was replaced by a newer one: two processes use this name, or "
                "this learner was silent for too long and another took over; stop one of them"
            )
        peer = self._peers.get(sender)
        if peer is not None:
            # A first Hello may have been on its way while its sender still heard a former broker's acknowledgements.
            peer.inbox.skip_to(first_seq)
            self.hear(peer, now)
            return []
        if len(self._peers) >= MAX_PEERS:
            raise SessionRefused(f"{len(self._peers)} peers are connected, {MAX_PEERS} allowed (MAX_PEERS)")
        replaced: list[SessionKey] = []
        if role == "rollout":
            replaced = [peer.key for peer in self.of_role("rollout") if peer.key.peer == sender.peer]
        elif role == "learner" and self.learner not in (None, sender):
            assert self.learner is not None
            self._require_silence(self.learner, sender, now)
            replaced = [self.learner]
        for other in replaced:
            self._peers.pop(other, None)
            self._fenced.append(other)
        peer = self._peers[sender] = Peer(key=sender, role=role, owner=owner, inbox=Inbox(first_seq), last_seen=now)
        if role == "learner":
            self.learner = sender
        self.hear(peer, now)
        return replaced

    def _require_silence(self, holder: SessionKey, sender: SessionKey, now: float) -> None:
        """Raises: PlaceTaken when the learner that has the run was heard a short time ago."""
        silent_s = self._listened_s - self._learner_heard_s
        if silent_s < LEARNER_LEASE_S:
            self.turned_away = (sender, now)
            raise PlaceTaken(
                f"learner session {holder.tag} ({holder.peer}) has this run and was heard {silent_s:.1f} s ago, and "
                f"there is one learner at a time: this one waits, and takes over when that one ends or says nothing for "
                f"{LEARNER_LEASE_S:g} s. If both were meant to train, give this one a broker and a run.directory of its own"
            )

    def hear(self, peer: Peer, now: float) -> None:
        """The session said something."""
        peer.last_seen = now
        if peer.key == self.learner:
            self._learner_heard_s = self._listened_s

    def hear_stranger(self, identity: bytes) -> None:
        """A connection without a session spoke. After a restart of the broker it may be that of the learner that has the
        run: that learner lives, and will say Hello when it is told to.
        """
        if self.learner is not None and belongs(identity, *self.learner):
            self._learner_heard_s = self._listened_s

    def get(self, sender: SessionKey) -> Peer | None:
        return self._peers.get(sender)

    def heartbeat(self, sender: SessionKey, heartbeat: Heartbeat) -> None:
        peer = self._peers[sender]
        peer.status = heartbeat.status
        peer.policy_version = heartbeat.policy_version

    def leave(self, sender: SessionKey) -> None:
        """The session said Goodbye."""
        del self._peers[sender]
        if sender == self.learner:
            self.learner = None

    def of_role(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == role]

    def prune(self, now: float) -> list[Peer]:
        """Forget silent sessions, and return them; a learner may be silent while it trains."""
        gone = [peer for peer in self._peers.values() if peer.role != "learner" and now - peer.last_seen > SILENT_S]
        for peer in gone:
            del self._peers[peer.key]
        return gone
