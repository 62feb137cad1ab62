"""Decides what ``max_lag`` allows: which groups may be started, and which go into the next batch. A windowed FIFO.

This is the only module that computes with ``max_lag``; everything else in the broker asks ``Admission``.

Words. L is max_lag, B groups per batch, v the version at which the next batch will be assembled. A group is *outstanding*
from its first grant until it is batched, dropped or filtered out. Its *oldest version* is a lower bound of the versions of
its action tokens: the smallest version that any of its tokens has, or that an engine served when it got one of its
trajectories. (A group without tokens and without leases counts with the newest version, because it can have nothing older.)
A group with oldest version f can be trained at the versions up to f + L: that is its deadline. One batch is assembled per
version, so

    feasible(v):    for every f:   N(f) <= (f + L - v + 1) * B,     N(f) = number of outstanding groups, oldest version <= f

says that the batches at versions v .. f + L have room for everything that is due by then.

Rules.
 1. A grant that adds a group, or lowers the oldest version of one, is made only if N(f) stays within its bound for all f
    that it touches.
 2. The next batch takes the B complete groups with the smallest (oldest version, age). It may pass over incomplete ones, but
    only if feasible(v + 1) holds for what remains; otherwise it waits for them.

Theorem: while one version follows each batch and versions of engines do not go back, no group is ever dropped as stale,
whatever the order in which groups become complete.
 Proof. feasible(v) is invariant. Grants keep it by rule 1. Otherwise oldest versions only rise (a lease ends unused), which
 only lowers N. Assembly moves v to v + 1 and rule 2 demands feasible(v + 1). With f = v - L, feasible(v + 1) reads
 N(v - L) <= 0: whatever is due at v is in the batch of v. So no group is outstanding beyond its deadline. QED

No deadlock: (a) rule 2 waits only for groups that exist, and their trajectories can always be granted to an engine that
serves the newest version, since that lowers no oldest version. When all are complete, taking the B smallest leaves
N(f) - B <= (f + L - v) * B: the wait ends. (b) With fewer than B outstanding groups an engine at any version p >= v - L
may start another: N(f) + 1 <= B <= (f + L - v + 1) * B for all f >= p.

After a learner's restart versions jump, and feasible(v) may be broken from outside. Rule 1 then refuses no more than it
has to, and rule 2 waits only where waiting helps: it compares with N(f) - B, the best that any choice can do.

The version v may not be announced yet: v counts assembled batches, and engines serve at most v in any case. Groups without
tokens then count with the version before. That is lower than necessary, so they can only wait longer.

L = 0 is the synchronous mode: N(v) <= B, and nothing is granted between a batch and the publication after it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outstanding:
    """One group, as admission sees it; ids grow with admission."""

    group_id: int
    oldest_version: int
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The groups of the next batch, in order; or, if ``group_ids`` is empty, the incomplete groups that it waits for."""

    group_ids: tuple[int, ...]
    due: tuple[int, ...] = ()
    """Incomplete groups that may not be passed over; empty when there are simply too few complete ones."""
    num_complete: int = 0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The rules of the module's text for one run."""

    max_lag: int
    groups_per_batch: int

    @property
    def max_groups(self) -> int:
        """Most groups that can be outstanding: the bound on N(v)."""
        return (self.max_lag + 1) * self.groups_per_batch

    def oldest_allowed(self, version: int) -> int:
        """The oldest version that can still go into the batch at ``version``. Versions begin at 1."""
        return max(1, version - self.max_lag)

    def allows(self, token_version: int, version: int) -> bool:
        """Whether the batch at ``version`` may hold a token of ``token_version``."""
        return version - token_version <= self.max_lag

    def num_places(self, oldest_version: int, version: int) -> int:
        """Groups that fit the batches from ``version`` to the deadline of a group with this oldest version."""
        return (oldest_version + self.max_lag - version + 1) * self.groups_per_batch

    def choose_batch(self, groups: Sequence[Outstanding], *, version: int) -> Choice:
        """The batch to assemble at ``version`` (rule 2)."""
        ordered = sorted(groups, key=lambda group: (group.oldest_version, group.group_id))
        complete = [group.group_id for group in ordered if group.complete]
        chosen = set(complete[: self.groups_per_batch])
        if len(chosen) < self.groups_per_batch:
            return Choice(group_ids=(), num_complete=len(complete))
        num_left = 0
        incomplete: list[int] = []
        for num_all, group in enumerate(ordered, start=1):
            if group.group_id not in chosen:
                num_left += 1
                if not group.complete:
                    incomplete.append(group.group_id)
            is_last_of_version = num_all == len(ordered) or ordered[num_all].oldest_version != group.oldest_version
            allowed = max(self.num_places(group.oldest_version, version + 1), num_all - self.groups_per_batch, 0)
            if is_last_of_version and num_left > allowed:
                return Choice(group_ids=(), due=tuple(incomplete), num_complete=len(complete))
        return Choice(group_ids=tuple(complete[: self.groups_per_batch]), num_complete=len(complete))


class Window:
    """Counts outstanding groups by oldest version, for the batch at ``version``, and admits what still fits (rule 1)."""

    def __init__(self, admission: Admission, oldest_versions: Mapping[int, int] | Iterable[int], *, version: int) -> None:
        """``oldest_versions``: that of each outstanding group; or, by oldest version, how many have it."""
        self._admission = admission
        self._version = version
        self._counts: dict[int, int] = dict(Counter(oldest_versions))

    @property
    def is_feasible(self) -> bool:
        """feasible(version) of the module's text."""
        return self._holds_from(min(self._counts, default=self._version))

    def add(self, oldest_version: int) -> bool:
        """Count one more group with this oldest version if it fits; returns whether it did."""
        if oldest_version < self._admission.oldest_allowed(self._version):
            return False
        self._change(oldest_version, 1)
        if self._holds_from(oldest_version):
            return True
        self._change(oldest_version, -1)
        return False

    def extend(self, oldest_version: int, engine_version: int) -> bool:
        """Let an engine at ``engine_version`` extend a group with this oldest version if that fits; returns whether it did.

        Only an engine behind the group lowers its oldest version.
        """
        if engine_version < self._admission.oldest_allowed(self._version):
            return False
        if engine_version >= oldest_version:
            return True
        self._change(oldest_version, -1)
        if self.add(engine_version):
            return True
        self._change(oldest_version, 1)
        return False

    def _change(self, oldest_version: int, by: int) -> None:
        count = self._counts.get(oldest_version, 0) + by
        if count:
            self._counts[oldest_version] = count
        else:
            del self._counts[oldest_version]

    def _holds_from(self, lowest: int) -> bool:
        total = 0
        for oldest_version in sorted(self._counts):
            total += self._counts[oldest_version]
            if oldest_version >= lowest and total > self._admission.num_places(oldest_version, self._version):
                return False
        return True
