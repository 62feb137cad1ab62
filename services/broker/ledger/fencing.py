"""Decides which session may use a peer's name and which learner owns the run; keeps each session's last report.

A newer session of a rollout fences the older ones with that name: they are lives of one process. Learners are different: the
run belongs to its learner as long as that learner lives, and it lives as long as the broker hears it.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from gspo_protocol.delivery import Inbox
from gspo_protocol.messages import Heartbeat, Role
from gspo_protocol.sessions import belongs
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.quotas import PLACES, Places, Subject, makes_room, subjects

MAX_FENCED: Final = 1024
SILENT_S: Final = 300.0
"""A rollout or operator that is silent for this long is forgotten; it says Hello when it comes back."""
LEARNER_LEASE_S: Final = 5.0
"""A learner heard within this time owns the run; only time in which the broker listened counts."""
LISTENING_S: Final = 2.0
"""More than this between two events: the broker was not listening (a disk that refuses, a stopped process)."""


class Owner(NamedTuple):
    """The proven identity of a peer; empty without keys."""

    key: bytes = b""
    """Its public key (Z85)."""
    name: str = ""
    """The key's name in the allow-list."""


NOBODY: Final = Owner()


class SessionRefused(ValueError):
    """The session is refused; the text goes to the peer, which must not try again."""


class PlaceTaken(ValueError):
    """Another learner has the run; the text goes to the peer, which may try again."""


@dataclass(kw_only=True)
class Peer:
    """One session and its state."""

    key: SessionKey
    role: Role
    owner: Owner
    """As of the peer's first Hello."""
    inbox: Inbox
    last_seen: float
    status: str = ""
    policy_version: int = 0

    @property
    def owner_key(self) -> bytes:
        return self.owner.key

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subjects that its faults count against; none for the learner."""
        return subjects_of(self.role, self.key.peer, self.owner)


def subjects_of(role: Role, peer: str, owner: Owner) -> tuple[Subject, ...]:
    """Return whom a peer's faults count against: no one for the learner, which the run needs."""
    return () if role == "learner" else subjects(peer, owner.name, shared=get_args(Role))


class Peers:
    """Sessions by (peer, session): one learner at a time, one session for each rollout name, any number of operators."""

    def __init__(self, now: float, learner: SessionKey | None = None, places: Mapping[Role, Places] = PLACES) -> None:
        """``learner`` owned the run under the last broker: it has one lease time to return before another takes over."""
        self._peers: dict[SessionKey, Peer] = {}
        self._places = places
        self._taken: dict[Role, Counter[bytes]] = {role: Counter() for role in get_args(Role)}
        self._rollouts: dict[str, SessionKey] = {}
        """The session of each rollout's name."""
        self._fenced: deque[SessionKey] = deque(maxlen=MAX_FENCED)
        self.learner = learner
        """The session that owns the run; None: none does."""
        self.turned_away: tuple[SessionKey, float] | None = None
        """The learner that was last told to wait, and when."""
        self._last_event = now
        self._listened_s = 0.0
        self._learner_heard_s = 0.0

    def listen(self, now: float) -> None:
        """Advance time. A long gap does not count: messages sent in it are still unread."""
        passed = now - self._last_event
        self._last_event = now
        if passed <= LISTENING_S:
            self._listened_s += passed

    def objection(self, sender: SessionKey, role: Role, owner: Owner) -> str:
        """Why the owner of a key must not speak for a session with this role; empty when it may.

        A session belongs for good to the role and the key that it first said Hello with.
        """
        peer = self._peers.get(sender)
        bound = peer.role if peer is not None else "learner" if sender == self.learner else role
        if role != bound:
            return f"session {sender.tag} of {sender.peer} belongs to the role {bound}, not to {role}"
        if peer is not None and owner.key != peer.owner.key:
            return f"session {sender.tag} of {sender.peer} belongs to another key"
        return ""

    def make_room(self, sender: SessionKey, role: Role, now: float, owner: Owner = NOBODY) -> Peer | None:
        """End a silent session for a new one if there is no place left; returns the one that went. Raises: NoPlace."""
        places = self._places.get(role)
        known = sender in self._peers or sender in self._fenced
        if places is None or known or (role == "rollout" and sender.peer in self._rollouts):
            return None
        gone = makes_room(self.of_role(role), self._taken[role], places, owner.key, now)
        if gone is not None:
            self._remove(gone.key)
        return gone

    def hello(self, sender: SessionKey, role: Role, first_seq: int, now: float, owner: Owner = NOBODY) -> list[SessionKey]:
        """Open a session, or continue it; returns the sessions that it replaces.

        Raises: SessionRefused for a session that was replaced already or belongs to another; PlaceTaken for a learner while
        another one has the run.
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
        replaced: list[SessionKey] = []
        if role == "rollout" and sender.peer in self._rollouts:
            replaced = [self._rollouts[sender.peer]]
        elif role == "learner" and self.learner not in (None, sender):
            assert self.learner is not None
            self._require_silence(self.learner, sender, now)
            replaced = [self.learner]
        for other in replaced:
            self._remove(other)
            self._fenced.append(other)
        peer = self._peers[sender] = Peer(key=sender, role=role, owner=owner, inbox=Inbox(first_seq), last_seen=now)
        self._taken[role][owner.key] += 1
        if role == "rollout":
            self._rollouts[sender.peer] = sender
        if role == "learner":
            self.learner = sender
        self.hear(peer, now)
        return replaced

    def _require_silence(self, holder: SessionKey, sender: SessionKey, now: float) -> None:
        """Raises: PlaceTaken when the run's learner was heard recently."""
        silent_s = self._listened_s - self._learner_heard_s
        if silent_s < LEARNER_LEASE_S:
            self.turned_away = (sender, now)
            raise PlaceTaken(
                f"learner session {holder.tag} ({holder.peer}) has this run and was heard {silent_s:.1f} s ago, and "
                f"there is one learner at a time: this one waits, and takes over when that one ends or says nothing for "
                f"{LEARNER_LEASE_S:g} s. If both were meant to train, give this one a broker and a run.directory of its own"
            )

    def hear(self, peer: Peer, now: float) -> None:
        """Note that the session was heard."""
        peer.last_seen = now
        if peer.key == self.learner:
            self._learner_heard_s = self._listened_s

    def hear_stranger(self, identity: bytes) -> None:
        """Note a message from a connection without a session. After a broker restart it may come from the run's learner:
        that learner is alive, and will say Hello when it is told to.
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
        """Remove a session that has ended."""
        self._remove(sender)
        if sender == self.learner:
            self.learner = None

    def of_role(self, role: Role) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.role == role]

    def of_subject(self, subject: Subject) -> list[Peer]:
        """The sessions in whose faults' name ``subject`` stands."""
        return [peer for peer in self._peers.values() if subject in peer.subjects]

    def prune(self, now: float) -> list[Peer]:
        """Forget silent sessions, and return them; a learner may be silent while it trains."""
        gone = [peer for peer in self._peers.values() if peer.role != "learner" and now - peer.last_seen > SILENT_S]
        for peer in gone:
            self._remove(peer.key)
        return gone

    def _remove(self, sender: SessionKey) -> None:
        peer = self._peers.pop(sender, None)
        if peer is None:
            return
        taken = self._taken[peer.role]
        taken[peer.owner.key] -= 1
        if not taken[peer.owner.key]:
            del taken[peer.owner.key]
        if self._rollouts.get(sender.peer) == sender:
            del self._rollouts[sender.peer]
