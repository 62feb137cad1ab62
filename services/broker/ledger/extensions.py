"""Usual chunks, which continue the current action, counted in columns for many trajectories at once. Pure.

They change eight numbers of a trajectory, but its row has 26 fields: a new row for each chunk would cost more than
all other decisions about it. Nor is the row written with each chunk: the chunks determine their changes, so readers of
a leased trajectory's row add the newer chunks.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from gspo_protocol.limits import TrajectoryLimits
from gspo_protocol.messages import GroupSampling
from gspo_protocol.messages.stretches import StretchColumns
from gspo_services.broker.rows import TrajectoryRow, VersionRow

MOST_BEHIND: Final = 16
"""At most this many usual chunks are stored before their trajectory's row, so a start reads no more for each lease."""
_FIRST_SLOTS: Final = 64
_NONE: Final = -1
(
    _TOKENS, _EPOCH, _TURN, _LEASE_VERSION, _LAST_VERSION, _MIN_VERSION, _VERSION_SUM, _RUNS, _MOST_TOKENS, _MOST_RUNS,
    _BEHIND,
) = range(11)  # fmt: skip
Holder = tuple[str, str]
"""Peer and session."""


class Taken(NamedTuple):
    """What became of some stretches."""

    is_taken: list[bool]
    """By stretch. False: nothing is counted, because these are not usual chunks under a lease of the sender, or
    one of them must be refused; ``growth`` says which."""
    with_other_bounds: list[int]
    """Trajectories whose version bounds have changed."""
    due: list[TrajectoryRow]
    """The rows to store with them; the others may lag behind their chunks."""


class Extensions:
    """Leased trajectories whose holders continue an action. Each has a slot in the columns."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._held: dict[Holder, dict[int, int]] = {}
        """The same by holder."""
        self._rows: list[TrajectoryRow] = []
        """By slot: as it was before the chunks that are only counted."""
        self._free: list[int] = []
        self._table = np.zeros((_BEHIND + 1, _FIRST_SLOTS), np.int64)
        self._grown = np.zeros(_FIRST_SLOTS, bool)
        """Whether the row of a slot is behind its columns."""

    def row(self, trajectory_id: int) -> TrajectoryRow | None:
        """A trajectory's row with all chunks so far; None: it has no slot, and nothing that its row lacks."""
        slot = self._slots.get(trajectory_id)
        return None if slot is None else self._row(slot)

    def begin(self, row: TrajectoryRow, *, limits: TrajectoryLimits, sampling: GroupSampling) -> None:
        """Give a trajectory a slot, if it has none, is leased, and may continue an action."""
        if row.trajectory_id in self._slots:
            return
        is_under_way = row.status == "leased" and row.finish_reason is None
        goes_on = is_under_way and not row.sequences and row.last_version >= 1
        if not goes_on or row.num_segments > limits.segments or row.num_turns > limits.turns:
            return
        slot = self._new_slot(row)
        self._slots[row.trajectory_id] = slot
        self._held.setdefault((row.holder_peer, row.holder_session), {})[row.trajectory_id] = slot
        most_tokens = min(sampling.max_tokens, sampling.max_episode_tokens)
        self._table[:, slot] = (
            row.num_tokens, row.epoch, row.num_turns - 1, row.lease_version, row.last_version, row.min_version,
            row.version_sum, row.num_runs, most_tokens, limits.runs, 0,
        )  # fmt: skip

    def forget(self, trajectory_id: int) -> None:
        """Free the trajectory's slot, if it has one: its row is up to date, or no longer needed."""
        slot = self._slots.pop(trajectory_id, None)
        if slot is None:
            return
        row = self._rows[slot]
        holder = (row.holder_peer, row.holder_session)
        del self._held[holder][trajectory_id]
        if not self._held[holder]:
            del self._held[holder]
        self._free.append(slot)

    def take(self, sender: Holder, stretches: StretchColumns, newest: VersionRow, begin: Callable[[int], None]) -> Taken:
        """Count all chunks of each stretch, with the same result as ``growth`` and ``grown_row`` one by one.

        ``begin`` is called with trajectories that have no slot of the sender's, and may give them one.
        """
        slots = self._slots_of(sender, stretches)
        if (unknown := stretches.is_usual & (slots == _NONE)).any():
            for trajectory_id in stretches.trajectory_id[unknown].tolist():
                begin(trajectory_id)
            slots = self._slots_of(sender, stretches)
        known = self._table[:, slots]
        end = known[_TOKENS] + stretches.num_tokens
        num_runs = known[_RUNS] + stretches.num_versions - (stretches.oldest == known[_LAST_VERSION])
        taken = (
            stretches.is_usual & stretches.is_only & (slots != _NONE) & (known[_EPOCH] == stretches.epoch)
            & (known[_TOKENS] == stretches.offset) & (known[_TURN] == stretches.turn)
            & (stretches.largest_token_id < newest.vocabulary) & (stretches.oldest >= known[_LEASE_VERSION])
            & (stretches.newest <= newest.policy_version) & (end <= known[_MOST_TOKENS]) & (num_runs <= known[_MOST_RUNS])
        )  # fmt: skip
        # A smaller oldest version alone changes no bound: it is no smaller than the lease's, which was one already.
        other = taken & (stretches.newest != known[_LEASE_VERSION])
        known[_TOKENS] = end
        known[_LEASE_VERSION] = known[_LAST_VERSION] = stretches.newest
        known[_MIN_VERSION] = np.minimum(known[_MIN_VERSION], stretches.oldest)
        known[_VERSION_SUM] += stretches.version_sum
        known[_RUNS] = num_runs
        known[_BEHIND] += 1
        due = slots[taken & (known[_BEHIND] == MOST_BEHIND)]
        known[_BEHIND] %= MOST_BEHIND
        changed = slots[taken]
        self._table[:, changed] = known[:, taken]
        self._grown[changed] = True
        return Taken(
            is_taken=taken.tolist(),
            with_other_bounds=stretches.trajectory_id[other].tolist(),
            due=[self._row(slot) for slot in due.tolist()],
        )

    def _slots_of(self, sender: Holder, stretches: StretchColumns) -> np.ndarray[Any, Any]:
        held = self._held.get(sender, {})
        return np.fromiter(map(held.get, stretches.trajectory_id.tolist(), repeat(_NONE)), np.int64)

    def _row(self, slot: int) -> TrajectoryRow:
        if self._grown[slot]:
            tokens, _, _, lease_version, last_version, min_version, version_sum, runs, *_ = self._table[:, slot].tolist()
            row = self._rows[slot]
            self._rows[slot] = replace(
                row,
                num_tokens=tokens,
                num_action_tokens=row.num_action_tokens + tokens - row.num_tokens,
                version_sum=version_sum,
                min_version=min_version,
                lease_version=lease_version,
                num_runs=runs,
                last_version=last_version,
            )
            self._grown[slot] = False
        return self._rows[slot]

    def _new_slot(self, row: TrajectoryRow) -> int:
        if self._free:
            slot = self._free.pop()
            self._rows[slot] = row
            return slot
        slot = len(self._rows)
        self._rows.append(row)
        if slot == len(self._grown):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._grown = np.concatenate([self._grown, np.zeros_like(self._grown)])
        return slot


def extended_row(row: TrajectoryRow, versions: Sequence[tuple[int, int]]) -> TrajectoryRow:
    """The row of a lease with the tokens of a usual chunk: ``versions`` made so many each, in this order."""
    oldest, last = versions[0][0], versions[-1][0]
    num_tokens = sum(number for _, number in versions)
    return replace(
        row,
        num_tokens=row.num_tokens + num_tokens,
        num_action_tokens=row.num_action_tokens + num_tokens,
        version_sum=row.version_sum + sum(version * number for version, number in versions),
        min_version=min(row.min_version, oldest),
        lease_version=last,
        num_runs=row.num_runs + len(versions) - (oldest == row.last_version),
        last_version=last,
    )
