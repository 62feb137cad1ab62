"""Decides how much of the broker's patience each peer may use, and who has used too much: slowed first, then shut out for a
while, then forgiven. Pure: time comes in as a number.

Each reason has a level for each peer, and for each key that is a peer's own. What the peer does raises it; time lowers it,
and so does finished work. Above ``slowed`` the peer is slowed; above ``shut_out`` it is shut out for SHUT_OUT_S. With half
of ``slowed`` it is in good standing again. A peer's work is only held against it while another rollout works well: a fault
that all share is the run's own.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from gspo_protocol.limits import MAX_PEERS

OffenceReason = Literal["messages", "refused", "failed", "expired", "idle", "stale"]
Limited = Literal["slowed", "shut_out"]
MINUTE_S: Final = 60.0
SHUT_OUT_S: Final = 60.0
"""A peer that is shut out says Hello again after this long, and is slowed until it has behaved for a while."""
SLOWED_RETRY_S: Final = 5.0
"""A slowed rollout gets SLOWED_LEASES leases at most once in this time, which doubles with each until it finishes one."""
MAX_SLOWED_RETRY_S: Final = 320.0
SLOWED_LEASES: Final = 1
MAX_NAMED: Final = 64
"""Peers that Status names, those with the most offences first."""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What one peer may do for one reason: far above what an honest peer ever does."""

    slowed: float
    """The level above which it is slowed."""
    forgiven_per_s: float
    shut_out: float = math.inf
    """The level above which it is shut out."""
    forgiven_per_finish: float = 0.0
    key_share: float = 1.0
    """The joint quota of all peers with one unshared key, as a multiple of one peer's."""
    what: str = ""
    """What is counted, after a number."""

    @property
    def most(self) -> float:
        """The highest level: offences of a limited peer do not add up without bound, and are forgiven in the end."""
        return self.shut_out + 1 if math.isfinite(self.shut_out) else 2 * self.slowed

    def of_a_key(self) -> "Quota":
        """The quota of all peers with one own key together."""
        share = self.key_share
        return replace(
            self,
            slowed=self.slowed * share,
            forgiven_per_s=self.forgiven_per_s * share,
            shut_out=self.shut_out * share,
        )


QUOTAS: Final[Mapping[OffenceReason, Quota]] = {
    "messages": Quota(slowed=5000, forgiven_per_s=500, shut_out=20_000, key_share=32, what="requests"),
    "refused": Quota(slowed=40, forgiven_per_s=40 / MINUTE_S, shut_out=200, what="refused messages"),
    "failed": Quota(slowed=40, forgiven_per_s=40 / MINUTE_S, forgiven_per_finish=1, key_share=32, what="failed attempts"),
    "expired": Quota(
        slowed=8,
        forgiven_per_s=0.5 / MINUTE_S,
        forgiven_per_finish=0.5,
        key_share=32,
        what="times it let leases lapse unused",
    ),
    "idle": Quota(
        slowed=16, forgiven_per_s=0.25 / MINUTE_S, forgiven_per_finish=1, key_share=32, what="leases renewed without a token"
    ),
    "stale": Quota(
        slowed=64, forgiven_per_s=1, forgiven_per_finish=1, key_share=32, what="groups that became too old in its hands"
    ),
}
"""messages: requests, heartbeats, Hellos and Goodbyes; a StatusRequest counts STATUS_WEIGHT times. refused: chunks, finishes
and requests that were answered with Refused. failed: attempts that a rollout reported as failed. expired: how often leases
lapsed, or were taken back, without a token, however many at once. idle: leases that were renewed for long without a token.
stale: groups that were dropped as stale while it held one of their leases."""
STATUS_WEIGHT: Final = 20


class Subject(NamedTuple):
    """The holder of a level: a peer, or an unshared key with all its peers."""

    name: str
    is_key: bool = False

    def __str__(self) -> str:
        return f"the key {self.name}" if self.is_key else self.name


class Change(NamedTuple):
    """A change of somebody's standing, for the log."""

    event: str
    subject: Subject
    fields: dict[str, Any]


def subjects(peer: str, key_name: str, shared: Iterable[str]) -> tuple[Subject, ...]:
    """The subjects of a peer: itself, and its key unless that is a role's, which all peers of the role may have."""
    own = (Subject(key_name, is_key=True),) if key_name and key_name not in shared else ()
    return (Subject(peer), *own)


@dataclass
class _Level:
    """How much is held against one subject for one reason; ``rate`` is about the number within the last minute."""

    level: float = 0.0
    rate: float = 0.0
    at: float = 0.0

    def advance(self, quota: Quota, now: float) -> None:
        passed = max(0.0, now - self.at)
        self.at = now
        self.level = max(0.0, self.level - passed * quota.forgiven_per_s)
        self.rate *= math.exp(-passed / MINUTE_S)


@dataclass
class _Account:
    levels: dict[OffenceReason, _Level] = field(default_factory=dict)
    slowed: set[OffenceReason] = field(default_factory=set)
    shut_out_until: float = -math.inf
    shut_out_for: OffenceReason | None = None
    next_lease_at: float = -math.inf
    lease_pause_s: float = SLOWED_RETRY_S
    """Seconds that it waits after its next lease, while slowed."""


class Quotas:
    """The standing of each peer. It is forgotten with the broker."""

    def __init__(self, quotas: Mapping[OffenceReason, Quota] = QUOTAS) -> None:
        self._of_peers = quotas
        self._of_keys = {reason: quota.of_a_key() for reason, quota in quotas.items()}
        self._accounts: OrderedDict[Subject, _Account] = OrderedDict()

    def count(self, who: Iterable[Subject], reason: OffenceReason, now: float, number: float = 1.0) -> list[Change]:
        """Hold ``number`` more against a peer. Returns what is to be said about it: changes of its standing only."""
        changes: list[Change] = []
        for subject in who:
            quota = self._quota(subject, reason)
            account = self._account(subject)
            level = account.levels.setdefault(reason, _Level(at=now))
            level.advance(quota, now)
            level.level += number
            level.rate += number
            if level.level > quota.shut_out and now >= account.shut_out_until:
                account.shut_out_until, account.shut_out_for = now + SHUT_OUT_S, reason
                changes.append(self._change("peer_shut_out", subject, reason, level, now, seconds=SHUT_OUT_S))
            elif level.level > quota.slowed and reason not in account.slowed:
                changes.append(self._change("peer_slowed", subject, reason, level, now))
            if level.level > quota.slowed:
                account.slowed.add(reason)
            level.level = min(level.level, quota.most)
        return changes

    def finished(self, who: Iterable[Subject], now: float) -> None:
        """Good work weighs against what it has done."""
        for subject in who:
            account = self._accounts.get(subject)
            if account is None:
                continue
            account.lease_pause_s = SLOWED_RETRY_S
            for reason, level in account.levels.items():
                quota = self._quota(subject, reason)
                level.advance(quota, now)
                level.level = max(0.0, level.level - quota.forgiven_per_finish)

    def forgive(self, now: float) -> list[Change]:
        """Time has passed. Returns what is to be said: who is in good standing again."""
        changes: list[Change] = []
        for subject, account in list(self._accounts.items()):
            for reason, level in account.levels.items():
                quota = self._quota(subject, reason)
                level.advance(quota, now)
                if account.shut_out_for == reason and now >= account.shut_out_until:
                    account.shut_out_for = None
                    level.level = min(level.level, quota.slowed)
                if reason in account.slowed and account.shut_out_for is None and level.level <= quota.slowed / 2:
                    account.slowed.discard(reason)
                    changes.append(Change("peer_forgiven", subject, {"reason": reason}))
            if (
                not account.slowed
                and account.shut_out_for is None
                and all(not level.level for level in account.levels.values())
            ):
                del self._accounts[subject]
        return changes

    def ignores(self, who: Iterable[Subject], now: float) -> bool:
        """Whether the peer asks too much at this moment: its requests are not answered."""
        return any(self._exceeds(subject, "messages", now) for subject in who)

    def shut_out_s(self, who: Iterable[Subject], now: float) -> float:
        """For how long the peer is still shut out; 0: it is not."""
        accounts = [self._accounts.get(subject) for subject in who]
        return max((account.shut_out_until - now for account in accounts if account is not None), default=0.0)

    def is_slowed(self, who: Iterable[Subject]) -> bool:
        """Whether the peer's work, not the number of its messages, has used up its quota."""
        accounts = [self._accounts.get(subject) for subject in who]
        return any(account is not None and account.slowed - {"messages"} for account in accounts)

    def attempts(self, who: Iterable[Subject]) -> float:
        """How many attempts that came to nothing are held against the peer."""
        accounts = [self._accounts.get(subject) for subject in who]
        return max(
            (
                sum(level.level for reason, level in account.levels.items() if reason in ("refused", "failed", "idle"))
                for account in accounts
                if account is not None
            ),
            default=0.0,
        )

    def may_lease(self, who: Iterable[Subject], now: float) -> bool:
        """Whether a slowed peer gets its next lease now; then it waits, for twice as long as after the one before unless it
        has finished one meanwhile.
        """
        accounts = [self._account(subject) for subject in who]
        if any(now < account.next_lease_at for account in accounts):
            return False
        for account in accounts:
            account.next_lease_at = now + account.lease_pause_s
            account.lease_pause_s = min(2 * account.lease_pause_s, MAX_SLOWED_RETRY_S)
        return True

    def limited(self, now: float) -> list[dict[str, Any]]:
        """The peers that are slowed or shut out, as plain data: at most MAX_NAMED."""
        found: list[dict[str, Any]] = []
        for subject, account in self._accounts.items():
            reasons = account.slowed | ({account.shut_out_for} if account.shut_out_for is not None else set())
            for reason in sorted(reasons):
                level, quota = account.levels[reason], self._quota(subject, reason)
                level.advance(quota, now)
                found.append(
                    {
                        "peer": str(subject),
                        "standing": "shut_out" if account.shut_out_for == reason else "slowed",
                        "reason": reason,
                        "what": quota.what,
                        "per_minute": round(level.rate),
                        "seconds": max(0.0, account.shut_out_until - now) if account.shut_out_for == reason else None,
                    }
                )
        return sorted(found, key=lambda each: (each["standing"] != "shut_out", -each["per_minute"]))[:MAX_NAMED]

    def num_limited(self) -> dict[Limited, int]:
        """Peers and keys that are slowed, and those that are shut out."""
        shut_out = sum(1 for account in self._accounts.values() if account.shut_out_for is not None)
        slowed = sum(1 for account in self._accounts.values() if account.slowed and account.shut_out_for is None)
        return {"slowed": slowed, "shut_out": shut_out}

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _exceeds(self, subject: Subject, reason: OffenceReason, now: float) -> bool:
        account = self._accounts.get(subject)
        level = None if account is None else account.levels.get(reason)
        if level is None:
            return False
        quota = self._quota(subject, reason)
        level.advance(quota, now)
        return level.level > quota.slowed

    def _quota(self, subject: Subject, reason: OffenceReason) -> Quota:
        return (self._of_keys if subject.is_key else self._of_peers)[reason]

    def _account(self, subject: Subject) -> _Account:
        account = self._accounts.get(subject)
        if account is None:
            account = self._accounts[subject] = _Account()
            if len(self._accounts) > 2 * MAX_PEERS:
                self._accounts.popitem(last=False)
        return account

    def _change(
        self, event: str, subject: Subject, reason: OffenceReason, level: _Level, now: float, **more: float
    ) -> Change:
        return Change(event, subject, {"reason": reason, "per_minute": round(level.rate), **more})
