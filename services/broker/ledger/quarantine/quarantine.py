"""Decides what becomes of the groups of a quarantined batch, and of those that an operator requeues."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec.structs import replace

from gspo_services.broker.rows import GroupRow, LedgerContents, QuarantinedRow, TrajectoryRow

MAX_TEXT: Final = 1024
"""Characters that are kept of a reason: it travels in messages, with others."""
IN_A_ROW: Final = 3
"""After this many batches in a row were quarantined, the fault is not in the data: the run stops."""


@dataclass(frozen=True, kw_only=True)
class Shelved:
    """A group that left the groups in play, with its trajectories."""

    group: GroupRow
    members: tuple[TrajectoryRow, ...]

    @property
    def oldest_version(self) -> int:
        return min(row.min_version for row in self.members)


class Quarantine:
    """The groups of batches that may still be quarantined, of those that are, and of those that were requeued.

    A quarantined group keeps the number of its batch. The batch stays quarantined for good, whatever becomes of its
    groups, so that every learner and every replay skips it alike.
    """

    def __init__(self, contents: LedgerContents) -> None:
        self._batches: dict[int, QuarantinedRow] = {row.index: row for row in contents.quarantined}
        members: dict[int, list[TrajectoryRow]] = {}
        for row in contents.shelved_trajectories:
            members.setdefault(row.group_id, []).append(row)
        self._shelf: dict[int, Shelved] = {
            group.group_id: Shelved(group=group, members=tuple(members[group.group_id]))
            for group in contents.shelved_groups
            if group.status in ("batched", "quarantined", "requeued")
        }

    # --- look up -----------------------------------------------------------------------------------------

    def reason(self, index: int) -> str:
        """Why a batch was quarantined; empty if it was not."""
        row = self._batches.get(index)
        return "" if row is None else row.reason

    @property
    def batches(self) -> Sequence[QuarantinedRow]:
        """All that were ever quarantined, in the order of their indices."""
        return [self._batches[index] for index in sorted(self._batches)]

    def waiting(self) -> dict[int, int]:
        """The batches with quarantined groups, and how many."""
        found: dict[int, int] = {}
        for shelved in self._with("quarantined"):
            index = shelved.group.batch
            assert index is not None
            found[index] = found.get(index, 0) + 1
        return found

    @property
    def num_groups(self) -> int:
        """Groups that are quarantined, or requeued and still waiting for room."""
        return len(self._with("quarantined")) + len(self.requeued)

    @property
    def requeued(self) -> list[Shelved]:
        """The requeued groups, which wait for room, in the order of their prompts."""
        return sorted(self._with("requeued"), key=lambda shelved: (shelved.group.prompt, shelved.group.group_id))

    def is_one_too_many(self, index: int) -> bool:
        """Whether ``index`` and the batches before it, IN_A_ROW together, are all quarantined."""
        return all(other in self._batches for other in range(index, index - IN_A_ROW, -1))

    # --- transitions ----------------------------------------------------------------------------------------------

    def keep(self, group: GroupRow, members: Sequence[TrajectoryRow]) -> None:
        """The group went into a batch, which may be quarantined until a checkpoint covers it."""
        self._shelf[group.group_id] = Shelved(group=group, members=tuple(members))

    def forget_below(self, checkpointed: int) -> None:
        """A checkpoint covers the batches below: their learner has survived them."""
        for shelved in self._with("batched"):
            if shelved.group.batch is not None and shelved.group.batch < checkpointed:
                del self._shelf[shelved.group.group_id]

    def add(self, index: int, policy_version: int, reason: str) -> tuple[QuarantinedRow, list[Shelved]]:
        """Returns the batch's row, and its groups as they are now."""
        row = self._batches[index] = QuarantinedRow(index=index, policy_version=policy_version, reason=reason[:MAX_TEXT])
        members = [shelved for shelved in self._with("batched") if shelved.group.batch == index]
        return row, [self._change(shelved, "quarantined") for shelved in members]

    def requeue(self, indices: Iterable[int]) -> list[Shelved]:
        """Requeue the groups of these batches, or of all if none is named. Raises: ValueError for another batch."""
        waiting = self.waiting()
        wanted = set(indices) or set(waiting)
        unknown = sorted(wanted - set(waiting))
        if unknown:
            known = ", ".join(map(str, sorted(waiting))) or "none"
            raise ValueError(f"batch {unknown[0]} is not in quarantine, or was requeued before; in quarantine: {known}")
        found = [shelved for shelved in self._with("quarantined") if shelved.group.batch in wanted]
        return [self._change(shelved, "requeued") for shelved in found]

    def take_back(self, group_id: int) -> Shelved:
        """A requeued group is in play again, complete as it was."""
        shelved = self._shelf.pop(group_id)
        return Shelved(group=replace(shelved.group, status="complete", batch=None), members=shelved.members)

    def resample(self, group_id: int) -> GroupRow:
        """A requeued group is too old: another one gets its prompt."""
        return replace(self._shelf.pop(group_id).group, status="resampled")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _with(self, status: Literal["batched", "quarantined", "requeued"]) -> list[Shelved]:
        return [shelved for shelved in self._shelf.values() if shelved.group.status == status]

    def _change(self, shelved: Shelved, status: Literal["quarantined", "requeued"]) -> Shelved:
        changed = Shelved(group=replace(shelved.group, status=status), members=shelved.members)
        self._shelf[shelved.group.group_id] = changed
        return changed


def requeued_line(requeued: Iterable[Shelved], by: str, policy_version: int) -> dict[str, Any]:
    """The line of metrics.jsonl about requeued groups."""
    groups = [each.group for each in requeued]
    return {
        "event": "requeued",
        "batches": sorted({group.batch for group in groups if group.batch is not None}),
        "by": by,
        "policy_version": policy_version,
        "groups": [group.group_id for group in groups],
    }
