"""Decides which tasks rest: those whose groups had zero advantage several times in a row, solved always or never.

A resting task is skipped until enough batches are assembled. Everything follows from rows of the ledger.
"""

from collections.abc import Iterable
from typing import Final

from gspo_services.broker.rows import TaskRow

MOST_PASSED_OVER: Final = 1000
"""Draws that one prompt skips at most. If so many in a row rest, the task that returns first is sampled."""


class Rests:
    """What is known of tasks whose last group had zero advantage, or that rest."""

    def __init__(self, rows: Iterable[TaskRow], *, after_groups: int, num_batches: int) -> None:
        """A task rests after ``after_groups`` zero-advantage groups in a row (0: none does), for ``num_batches``."""
        self._rows = {row.task_index: row for row in rows}
        self._after_groups = after_groups
        self._num_batches = num_batches

    def rests_until(self, task_index: int) -> int:
        """The number of assembled batches at which the task is back; 0 for one that does not rest."""
        row = self._rows.get(task_index)
        return row.rests_until if row is not None and self._after_groups else 0

    def num_resting(self, num_assembled: int) -> int:
        """Tasks that rest now."""
        return sum(row.rests_until > num_assembled for row in self._rows.values()) if self._after_groups else 0

    def judge(self, task_index: int, num_assembled: int, *, has_advantage: bool) -> list[TaskRow]:
        """A group of the task is complete. Returns the row that changed, if one did."""
        if not self._after_groups:
            return []
        former = self._rows.get(task_index, TaskRow(task_index=task_index))
        num_zero_advantage = 0 if has_advantage else former.num_zero_advantage + 1
        rests_until = former.rests_until
        if num_zero_advantage >= self._after_groups:
            num_zero_advantage, rests_until = 0, num_assembled + self._num_batches
        row = TaskRow(task_index=task_index, num_zero_advantage=num_zero_advantage, rests_until=rests_until)
        if row == former:
            return []
        self._rows[task_index] = row
        return [row]
