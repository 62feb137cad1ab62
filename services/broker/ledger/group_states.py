"""Decides how groups and their trajectories change state: one transition per method, which returns the rows it changed."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from msgspec.structs import replace

from gspo_protocol.limits import TrajectoryLimits
from gspo_protocol.messages import Chunk, Finish, Graded, GroupSampling, LeaseKey, Split
from gspo_protocol.messages.stretches import StretchColumns
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.admission import Outstanding
from gspo_services.broker.ledger.extensions import Extensions, Taken
from gspo_services.broker.ledger.intake import Growth, grown_row
from gspo_services.broker.ledger.losses import is_suspect, is_unused, lost
from gspo_services.broker.rows import DropReason, GroupRow, LedgerContents, Row, TrajectoryRow, VersionRow

_GrantOrder = tuple[bool, bool, int, int]
"""Not held out, nothing generated, oldest version of the group (0: only its grade is missing), trajectory id."""
_FIRST_FOR_TRAINING: Final = (True, False, 0, 0)


class Groups:
    """Every open or complete group, with its trajectories. Batched, dropped and evaluated ones are forgotten here.

    Counts that every message needs are kept up to date: a fleet of a thousand rollouts has ten thousand groups.
    """

    def __init__(self, contents: LedgerContents) -> None:
        self._groups: dict[int, GroupRow] = {row.group_id: row for row in contents.groups}
        self._trajectories: dict[int, TrajectoryRow] = {row.trajectory_id: row for row in contents.trajectories}
        self._extensions = Extensions()
        """Leased trajectories extended by usual chunks; their rows in ``_trajectories`` lag behind."""
        self.expert_rows: dict[int, tuple[int, ...]] = {}
        """By trajectory: what its first experts are like (``TokenFacts.expert_row``), as far as this life has seen any."""
        self._members: dict[int, tuple[int, ...]] = {}
        self._oldest_versions: dict[int, int] = {}
        self._free: list[_GrantOrder] = []
        """Free trajectories in the order of grants; after the loss of a fleet there are tens of thousands."""
        self._orders: dict[int, _GrantOrder] = {}
        """The position of each free trajectory in ``_free``."""
        self._leased: set[int] = set()
        self._suspects: set[int] = set()
        self.num_leased_held_out = 0
        """Leased trajectories of evaluations."""
        self._held: defaultdict[str, set[int]] = defaultdict(set)
        """Leased trajectories by the name of their holder."""
        self._complete = {row.group_id for row in self.of_split("train") if row.status == "complete"}
        self._num_by_oldest: Counter[int] = Counter()
        """Training groups by their oldest version."""
        self._next_group_id = contents.next_group_id
        self._next_trajectory_id = contents.next_trajectory_id
        for row in contents.trajectories:
            self._members[row.group_id] = (*self._members.get(row.group_id, ()), row.trajectory_id)
            self._index(row, None)
        for group_id in self._groups:
            self._refresh_oldest_version(group_id)

    # --- look up -----------------------------------------------------------------------------------------

    def group(self, group_id: int) -> GroupRow:
        return self._groups[group_id]

    def trajectory(self, trajectory_id: int) -> TrajectoryRow | None:
        """Return a trajectory's row; None: it never existed, or its group is out of play."""
        return self._extensions.row(trajectory_id) or self._trajectories.get(trajectory_id)

    def members(self, group_id: int) -> list[TrajectoryRow]:
        return [self._row(trajectory_id) for trajectory_id in self._members[group_id]]

    def of_split(self, split: Split) -> Iterator[GroupRow]:
        return (row for row in self._groups.values() if row.split == split)

    @property
    def num_training(self) -> int:
        """Groups admitted for training, neither batched nor dropped."""
        return self._num_by_oldest.total()

    @property
    def num_complete(self) -> int:
        """Complete groups for training."""
        return len(self._complete)

    def num_by_oldest_version(self, newest_version: int) -> Counter[int]:
        """The training groups as admission counts them: by ``oldest_possible_version``."""
        counted = Counter(self._num_by_oldest)
        without = counted.pop(0, 0)
        if without:
            counted[newest_version] += without
        return counted

    def has_older_than(self, version: int) -> bool:
        """Whether a training group has, or is getting, tokens of a version below ``version``."""
        return any(0 < oldest_version < version for oldest_version in self._num_by_oldest)

    def held_by(self, peer: str) -> list[TrajectoryRow]:
        """Trajectories that a peer of this name has leased, under whatever session."""
        return [self._row(trajectory_id) for trajectory_id in sorted(self._held.get(peer, ()))]

    def are_held(self, sender: SessionKey, leases: Iterable[LeaseKey]) -> list[bool]:
        """Whether ``sender`` holds each of these: with every heartbeat it says so of all that it has."""
        find, holder = self._trajectories.get, tuple(sender)
        return [
            (row := find(key.trajectory_id)) is not None
            and row.status == "leased"
            and row.epoch == key.epoch
            and (row.holder_peer, row.holder_session) == holder
            for key in leases
        ]

    def leased(self) -> list[TrajectoryRow]:
        return [self._row(trajectory_id) for trajectory_id in sorted(self._leased)]

    def free_held_out(self) -> list[TrajectoryRow]:
        """Trajectories of evaluations that can be granted, by the oldest version of their group."""
        return [self._trajectories[order[-1]] for order in self._free[: bisect_left(self._free, _FIRST_FOR_TRAINING)]]

    def free_for_training(self) -> Iterator[TrajectoryRow]:
        """Those for training, as they are now, in the same order. Taken one by one: of many, few are granted at a time."""
        return (self._trajectories[order[-1]] for order in self._free[bisect_left(self._free, _FIRST_FOR_TRAINING) :])

    def suspects(self) -> list[TrajectoryRow]:
        """Free and leased trajectories that may have ended their holders, by id."""
        return [self._row(trajectory_id) for trajectory_id in sorted(self._suspects)]

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def oldest_version(self, group_id: int) -> int:
        """Lower bound of the versions of the group's action tokens; 0 when nothing is generated or being generated."""
        return self._oldest_versions[group_id]

    def outstanding(self, newest_version: int) -> list[Outstanding]:
        """The training groups as admission sees them."""
        return [
            Outstanding(
                group_id=row.group_id,
                oldest_version=self.oldest_possible_version(row.group_id, newest_version),
                complete=row.status == "complete",
            )
            for row in self.of_split("train")
        ]

    def oldest_possible_version(self, group_id: int, newest_version: int) -> int:
        """The group's oldest version; if it has none yet, the newest version, because it can get nothing older."""
        oldest_version = self._oldest_versions[group_id]
        return oldest_version if oldest_version else newest_version

    # --- transitions ----------------------------------------------------------------------------------------------

    def start(
        self,
        split: Split,
        prompt: int,
        task_index: int,
        size: int,
        evaluation: int | None,
        *,
        sampling: GroupSampling,
        replaces: int | None = None,
    ) -> GroupRow:
        """A new group of ``size`` free trajectories (see ``members``); its id is the largest so far."""
        group = GroupRow(
            group_id=self._next_group_id,
            split=split,
            prompt=prompt,
            task_index=task_index,
            evaluation=evaluation,
            status="open",
            sampling=sampling,
            replaces=replaces,
        )
        self._next_group_id += 1
        rows = [
            TrajectoryRow(trajectory_id=self._next_trajectory_id + index, group_id=group.group_id) for index in range(size)
        ]
        self._next_trajectory_id += size
        self._groups[group.group_id] = group
        self._members[group.group_id] = tuple(row.trajectory_id for row in rows)
        for row in rows:
            self._trajectories[row.trajectory_id] = row
            self._index(row, None)
        self._refresh_oldest_version(group.group_id)
        return group

    def grant(self, trajectory_id: int, sender: SessionKey, engine_version: int) -> TrajectoryRow:
        """Lease the trajectory under its next epoch: a fencing number, which shuts out all former holders.

        Who only compares the group's answers adds no token: the bounds of its versions stay.
        """
        row = self._row(trajectory_id)
        assert row.status == "free", row
        return self._put(
            replace(
                row,
                status="leased",
                epoch=row.epoch + 1,
                holder_peer=sender.peer,
                holder_session=sender.session,
                lease_version=row.min_version if row.awaits_grade else engine_version,
                lease_start=row.num_tokens,
            )
        )

    def append(self, chunk: Chunk, growth: Growth, expert_row: tuple[int, ...] = ()) -> TrajectoryRow:
        """Count the chunk's tokens. ``expert_row``: of its experts; empty: it has none."""
        if expert_row:
            self.expert_rows.setdefault(chunk.trajectory_id, expert_row)
        return self._put(grown_row(self._row(chunk.trajectory_id), chunk, growth))

    def extend(self, sender: SessionKey, stretches: StretchColumns, newest: VersionRow, limits: TrajectoryLimits) -> Taken:
        """Count the tokens of all chunks of those stretches that are usual ones under a lease of ``sender``."""

        def begin(trajectory_id: int) -> None:
            if (row := self._trajectories.get(trajectory_id)) is not None:
                self._extensions.begin(row, limits=limits, sampling=self._groups[row.group_id].sampling)

        taken = self._extensions.take(sender, stretches, newest, begin)
        for trajectory_id in taken.with_other_bounds:
            self._refresh_oldest_version(self._trajectories[trajectory_id].group_id)
        return taken

    def note(self, trajectory_id: int, num_bytes: int) -> TrajectoryRow:
        """Count an entry of the journal."""
        row = self._row(trajectory_id)
        return self._put(replace(row, num_entries=row.num_entries + 1, journal_bytes=row.journal_bytes + num_bytes))

    def finish(self, finish: Finish, *, grades: bool = False) -> list[Row]:
        """Finish the episode; the last one completes its group. ``grades``: the last one is leased again, to grade it."""
        row = replace(
            self._row(finish.trajectory_id),
            finish_reason=finish.reason,
            turn_rewards=tuple(finish.turn_rewards),
            discarded_turns=tuple(finish.discarded_turns),
            components=finish.components,
            turn_roles=tuple(finish.turn_roles),
            lost_by=(),
        )
        if grades:
            others = (each for each in self._members[row.group_id] if each != row.trajectory_id)
            is_last = not any(map(self._is_under_way, others))
            return [self._end_lease(row, "free", attempts=0) if is_last else self._end_lease(row, "ended")]
        row = self._end_lease(row, "finished")
        return [row, *self._complete_if_all_done(row.group_id)]

    def grade(self, graded: Graded, group_id: int) -> list[Row]:
        """Give each member its reward beside the others, in place of its own; the group is complete."""
        rows = []
        for row, reward, components in zip(self.members(group_id), graded.rewards, graded.components, strict=True):
            rewards = [0.0] * row.num_turns
            rewards[row.last_turn] = reward
            new = replace(row, turn_rewards=tuple(rewards), components=components)
            is_leased = new.status == "leased"
            rows.append(self._end_lease(new, "finished") if is_leased else self._put(replace(new, status="finished")))
        return [*rows, *self._complete_if_all_done(group_id)]

    def release(self, trajectory_id: int, *, failed: bool) -> TrajectoryRow:
        """End the lease, so that the trajectory can resume elsewhere."""
        row = self._row(trajectory_id)
        return self._end_lease(row, "free", attempts=row.attempts + int(failed))

    def lose(self, trajectory_id: int) -> TrajectoryRow:
        """The same for a lease whose holder has ended."""
        return self._end_lease(lost(self._row(trajectory_id)), "free")

    def give_up(self, trajectory_id: int) -> list[Row]:
        """Give up a held-out trajectory that failed for good; its group completes without it."""
        row = self._end_lease(self._row(trajectory_id), "failed")
        return [row, *self._complete_if_all_done(row.group_id)]

    def close(self, group_ids: Iterable[int], batch: int | None) -> list[GroupRow]:
        """Close groups that went into ``batch``, or (None) whose evaluation is over."""
        status: Literal["batched", "evaluated"] = "evaluated" if batch is None else "batched"
        return [replace(self._forget(group_id), status=status, batch=batch) for group_id in group_ids]

    def take_back(self, group: GroupRow, members: Iterable[TrajectoryRow]) -> None:
        """Put a complete group back in play."""
        rows = list(members)
        self._groups[group.group_id] = group
        self._members[group.group_id] = tuple(row.trajectory_id for row in rows)
        for row in rows:
            self._trajectories[row.trajectory_id] = row
        self._note_complete(group)
        self._refresh_oldest_version(group.group_id)

    def drop(self, group_id: int, reason: DropReason) -> GroupRow:
        return replace(self._forget(group_id), status="dropped", drop_reason=reason)

    def leave_out(self, group_id: int) -> GroupRow:
        """A complete group teaches nothing: it leaves play."""
        return replace(self._forget(group_id), status="filtered")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _row(self, trajectory_id: int) -> TrajectoryRow:
        """A trajectory as it is now."""
        return self._extensions.row(trajectory_id) or self._trajectories[trajectory_id]

    def _end_lease(
        self,
        row: TrajectoryRow,
        status: Literal["free", "ended", "finished", "failed"],
        *,
        attempts: int | None = None,
    ) -> TrajectoryRow:
        assert row.status == "leased", row
        return self._put(
            replace(
                row,
                status=status,
                holder_peer="",
                holder_session="",
                lease_version=0,
                lease_start=0,
                attempts=row.attempts if attempts is None else attempts,
                lost_by=row.lost_by if is_unused(row) else (),
            )
        )

    def _complete_if_all_done(self, group_id: int) -> list[Row]:
        if any(self._is_under_way(trajectory_id) for trajectory_id in self._members[group_id]):
            return []
        self._groups[group_id] = replace(self._groups[group_id], status="complete")
        self._note_complete(self._groups[group_id])
        return [self._groups[group_id]]

    def _is_under_way(self, trajectory_id: int) -> bool:
        return self._trajectories[trajectory_id].status in ("free", "leased")

    def _put(self, row: TrajectoryRow) -> TrajectoryRow:
        former = self._row(row.trajectory_id)
        self._extensions.forget(row.trajectory_id)
        self._trajectories[row.trajectory_id] = row
        if row.status != former.status:
            self._index(row, former)
        if self._may_turn_oldest(row, former):
            self._refresh_oldest_version(row.group_id)
        return row

    def _may_turn_oldest(self, row: TrajectoryRow, former: TrajectoryRow) -> bool:
        """Whether the change of one member can change its group's oldest version, which reads all members."""
        was, now = _bounds(former), _bounds(row)
        oldest_version = self._oldest_versions[row.group_id]
        lower = any(version < oldest_version or not oldest_version for version in now)
        return lower or (oldest_version in was and oldest_version not in now)

    def _index(self, row: TrajectoryRow, former: TrajectoryRow | None) -> None:
        self._no_longer_free(row.trajectory_id)
        self._suspects.discard(row.trajectory_id)
        if row.status in ("free", "leased") and is_suspect(row):
            self._suspects.add(row.trajectory_id)
        if row.status == "free":
            self._now_free(row)
        if former is not None:
            self._no_longer_held(former)
        if row.status == "leased":
            self._held[row.holder_peer].add(row.trajectory_id)
            self._leased.add(row.trajectory_id)
            self.num_leased_held_out += self._groups[row.group_id].split == "eval"

    def _no_longer_held(self, row: TrajectoryRow) -> None:
        """``row``: as it was under its lease, if it had one."""
        if row.status == "leased":
            self._leased.discard(row.trajectory_id)
            self.num_leased_held_out -= self._groups[row.group_id].split == "eval"
            held = self._held[row.holder_peer]
            held.discard(row.trajectory_id)
            if not held:
                del self._held[row.holder_peer]

    def _note_complete(self, group: GroupRow) -> None:
        if group.split == "train" and group.status == "complete":
            self._complete.add(group.group_id)

    def _refresh_oldest_version(self, group_id: int) -> None:
        bounds = [version for row in self.members(group_id) for version in _bounds(row)]
        self._no_longer_counted(group_id)
        self._oldest_versions[group_id] = oldest_version = min(bounds, default=0)
        for trajectory_id in self._members[group_id]:
            if trajectory_id in self._orders and self._orders[trajectory_id][2] != oldest_version:
                self._no_longer_free(trajectory_id)
                self._now_free(self._trajectories[trajectory_id])
        if self._groups[group_id].split == "train":
            self._num_by_oldest[oldest_version] += 1

    def _no_longer_counted(self, group_id: int) -> None:
        former = self._oldest_versions.pop(group_id, None)
        if former is not None and self._groups[group_id].split == "train":
            self._num_by_oldest[former] -= 1
            if not self._num_by_oldest[former]:
                del self._num_by_oldest[former]

    def _forget(self, group_id: int) -> GroupRow:
        for trajectory_id in self._members.pop(group_id):
            self._extensions.forget(trajectory_id)
            self.expert_rows.pop(trajectory_id, None)
            self._suspects.discard(trajectory_id)
            self._no_longer_held(self._trajectories.pop(trajectory_id))
            self._no_longer_free(trajectory_id)
        self._no_longer_counted(group_id)
        self._complete.discard(group_id)
        return self._groups.pop(group_id)

    def _now_free(self, row: TrajectoryRow) -> None:
        # A group not seen before counts as one without tokens.
        oldest_version = self._oldest_versions.get(row.group_id, 0)
        is_eval = self._groups[row.group_id].split == "eval"
        order = (not is_eval, not oldest_version, 0 if row.awaits_grade else oldest_version, row.trajectory_id)
        self._orders[row.trajectory_id] = order
        insort(self._free, order)

    def _no_longer_free(self, trajectory_id: int) -> None:
        order = self._orders.pop(trajectory_id, None)
        if order is not None:
            del self._free[bisect_left(self._free, order)]


def _bounds(row: TrajectoryRow) -> list[int]:
    """The versions that may have written the trajectory's oldest token."""
    return [version for version in (row.min_version, row.lease_version) if version]
