"""Decides when a batch has ended its learner often enough.

A learner that reports a failure (training raised, the loss was not finite) is believed: the second report is enough.
A learner that dies without a report may have been killed for another reason: by an operator, a preemption, or the memory of
another process. Only the third such death in a row on the same batch counts: a learner that dies at another batch, or
trains this one, breaks the row. If each learner is killed after t seconds on average and a batch takes b, one that is
healthy is quarantined with a probability of about (1 - exp(-b / t)) ** 3; where that is not small, nothing would be trained
either.
"""

from typing import Final

from msgspec.structs import replace

from gspo_services.broker.rows import FailureRow, LedgerContents, Row

REPORTED_MOST: Final = 2
SILENT_MOST: Final = 3


class Failures:
    """Counts by batch. Training a batch resets its counts."""

    def __init__(self, contents: LedgerContents) -> None:
        self._rows: dict[int, FailureRow] = {row.index: row for row in contents.failures}

    def of(self, index: int) -> FailureRow:
        return self._rows.get(index, FailureRow(index=index))

    def report(self, index: int, session: str, reason: str) -> list[Row]:
        """Count a report of the learner ``session`` that the batch could not be trained; no rows for a second report."""
        former = self.of(index)
        if former.session == session:
            return []
        return [self._put(replace(former, reported=former.reported + 1, session=session, reason=reason))]

    def ended_silently(self, index: int) -> list[Row]:
        """Count a learner that died without a report while training the batch."""
        others = [row for row in self._rows.values() if row.silent and row.index != index]
        former = self.of(index)
        counted = self._put(replace(former, silent=former.silent + 1))
        return [counted, *(self._put(replace(row, silent=0)) for row in others)]

    def trained(self, index: int) -> list[Row]:
        """Reset the counts of a batch that was trained."""
        former = self.of(index)
        if not former.reported and not former.silent:
            return []
        return [self._put(FailureRow(index=index))]

    def verdict(self, index: int) -> str:
        """Why the batch must be quarantined; empty while it need not."""
        row = self.of(index)
        if row.reported >= REPORTED_MOST:
            return f"{row.reported} learners could not train it: {row.reason}"
        if row.reported + row.silent < SILENT_MOST:
            return ""
        silent = f"{row.silent} learners in a row ended without a word while they trained it"
        return f"{silent}, and one could not train it: {row.reason}" if row.reported else silent

    def forget_below(self, checkpointed: int) -> None:
        """Drop the counts of batches that a checkpoint covers."""
        for index in [index for index in self._rows if index < checkpointed]:
            del self._rows[index]

    def _put(self, row: FailureRow) -> FailureRow:
        self._rows[row.index] = row
        return row
