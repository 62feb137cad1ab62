"""Which groups may be started, and which go into the next batch, so that no token gets too old: a windowed FIFO.

Words. L is max_lag, B groups per batch, v the version at which the next batch will be assembled. A group is *outstanding*
from its first grant until it is batched or dropped. Its *floor* is a lower bound of the versions of its action tokens: the
smallest version that any of its tokens has, or that an engine served when it was given one of its trajectories. (A group
of which nothing is generated and nothing is leased counts with the newest version: it can have nothing older.) A group
with floor f can be trained at the versions up to f + L: that is its deadline. One batch is assembled per version, so

    feasible(v):    for every floor f:   N(f) <= (f + L - v + 1) * B,     N(f) = number of outstanding groups with floor <= f

says that the batches at versions v .. f + L have room for everything that is due by then.

Rules.
 1. A grant that adds a group, or lowers the floor of one, is made only if N(f) stays within its bound for all f that it
    touches.
 2. The next batch takes the B complete groups with the smallest (floor, age). It may pass over incomplete ones, but only
    if feasible(v + 1) holds for what remains; otherwise it waits for them.

Theorem: while one version follows each batch and versions of engines do not go back, no group is ever dropped as stale,
whatever the order in which groups become complete.
 Proof. feasible(v) is invariant. Grants keep it by rule 1. Floors rise otherwise (a lease ends unused), which only lowers
 N. Assembly moves v to v + 1 and rule 2 demands feasible(v + 1). With f = v - L, feasible(v + 1) reads N(v - L) <= 0:
 whatever is due at v is in the batch of v. So no group is outstanding beyond its deadline. QED

No deadlock: (a) rule 2 waits only for groups that exist, and their trajectories can always be granted to an engine that
serves the newest version, since that lowers no floor. When all are complete, taking the B smallest leaves
N(f) - B <= (f + L - v) * B: the wait ends. (b) With fewer than B outstanding groups an engine at any version p >= v - L
may start another: N(f) + 1 <= B <= (f + L - v + 1) * B for all f >= p.

After a learner's restart versions jump, and feasible(v) may be broken from outside. Rule 1 then refuses nothing that it
does not have to, and rule 2 waits only where waiting helps: it compares with N(f) - B, the best that any choice can do.

The version v may be one that is being announced: v counts assembled batches, and engines serve at most v in any case. Groups
of which nothing is generated then count with the version before: lower than need be, so that they may only wait longer.

L = 0 is the synchronous mode: N(v) <= B, and nothing is granted between a batch and the publication after it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outstanding:
    """One group, as admission sees it; ids grow with admission."""

    group_id: int
    floor: int
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The groups of the next batch, in order; or, if ``group_ids`` is empty, the incomplete groups that it waits for."""

    group_ids: tuple[int, ...]
    due: tuple[int, ...] = ()
    """Incomplete groups that may not be passed over; empty when there are simply too few complete ones."""
    num_complete: int = 0


class Window:
    """Counts of outstanding groups by floor, for the version of the next batch."""

    def __init__(self, floors: Iterable[int], *, version: int, max_lag: int, groups_per_batch: int) -> None:
        self._counts: dict[int, int] = {}
        self._version = version
        self._max_lag = max_lag
        self._groups_per_batch = groups_per_batch
        for floor in floors:
            self._counts[floor] = self._counts.get(floor, 0) + 1

    @property
    def is_feasible(self) -> bool:
        """feasible(version) of the module's text."""
        return self._holds_from(min(self._counts, default=self._version))

    def add(self, floor: int) -> bool:
        """Count one more group of this floor if it fits (rule 1); says whether it did."""
        self._change(floor, 1)
        if self._holds_from(floor):
            return True
        self._change(floor, -1)
        return False

    def lower(self, old_floor: int, new_floor: int) -> bool:
        """Move a group down to ``new_floor`` if it fits (rule 1); says whether it did. A higher floor always fits."""
        if new_floor >= old_floor:
            return True
        self._change(old_floor, -1)
        if self.add(new_floor):
            return True
        self._change(old_floor, 1)
        return False

    def _change(self, floor: int, by: int) -> None:
        count = self._counts.get(floor, 0) + by
        if count:
            self._counts[floor] = count
        else:
            del self._counts[floor]

    def _holds_from(self, lowest: int) -> bool:
        total = 0
        for floor in sorted(self._counts):
            total += self._counts[floor]
            if floor >= lowest and total > (floor + self._max_lag - self._version + 1) * self._groups_per_batch:
                return False
        return True


def choose_batch(groups: Sequence[Outstanding], *, version: int, max_lag: int, groups_per_batch: int) -> Choice:
    """The batch to assemble at ``version`` (rule 2)."""
    ordered = sorted(groups, key=lambda group: (group.floor, group.group_id))
    complete = [group.group_id for group in ordered if group.complete]
    chosen = set(complete[:groups_per_batch])
    if len(chosen) < groups_per_batch:
        return Choice(group_ids=(), num_complete=len(complete))
    num_left = 0
    incomplete: list[int] = []
    for num_all, group in enumerate(ordered, start=1):
        if group.group_id not in chosen:
            num_left += 1
            if not group.complete:
                incomplete.append(group.group_id)
        last_of_floor = num_all == len(ordered) or ordered[num_all].floor != group.floor
        allowed = max((group.floor + max_lag - version) * groups_per_batch, num_all - groups_per_batch, 0)
        if last_of_floor and num_left > allowed:
            return Choice(group_ids=(), due=tuple(incomplete), num_complete=len(complete))
    return Choice(group_ids=tuple(complete[:groups_per_batch]), num_complete=len(complete))
