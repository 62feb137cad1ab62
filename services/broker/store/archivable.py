"""Chooses the groups of the next archive file."""

from collections.abc import Container
from typing import Final, NamedTuple

from gspo_services.broker.rows import ArchiveRow, BatchRow, GroupRow
from gspo_services.broker.store.reader import Reader

TOKEN_BYTES: Final = 8
"""A token id and its log-prob."""
MEASURE: Final = "SELECT coalesce(sum(num_tokens), 0) FROM trajectories WHERE group_id = {}"
WITHOUT_BATCH: Final = """
WHERE status IN ('dropped', 'evaluated', 'filtered', 'resampled')
AND group_id NOT IN (SELECT group_id FROM archived) ORDER BY group_id
"""
OF_BATCH: Final = """
WHERE batch = ? AND status = 'batched' AND group_id IN
(SELECT value FROM json_each((SELECT group_ids FROM batches WHERE batch = ?))) ORDER BY group_id
"""


class Archivable(NamedTuple):
    """What may go into a file."""

    group_ids: list[int]
    """None while there are too few."""
    due: int
    """With how many ``batches_to_archive`` it is enough if more are as large, or twice as many wait; 0: with groups."""


def next_archive(reader: Reader) -> int:
    """The number of the next archive file."""
    return 1 + max((row.archive for row in reader.rows(ArchiveRow, "ORDER BY archive DESC LIMIT 1")), default=0)


def batches_to_archive(reader: Reader, keep_batches: int) -> int:
    """The first batches of the run that may be in files: a checkpoint covers them, and they are not the newest."""
    checkpointed = reader.number("SELECT max(next_batch) FROM checkpointed")
    assembled = 1 + max((row.index for row in reader.rows(BatchRow, "ORDER BY batch DESC LIMIT 1")), default=-1)
    return min(checkpointed, assembled - keep_batches)


def groups_to_archive(
    reader: Reader, *, keep_batches: int, num_bytes: int, skipped: Container[int] = frozenset()
) -> Archivable:
    """Groups for one file of about ``num_bytes`` of tokens and log-probs. It reads the rows of all that may go.

    Of batches, those that a checkpoint covers, without the newest ``keep_batches``, in their order; before them, what was
    dropped or evaluated since the last file. ``skipped`` groups stay where they are.
    """
    end = batches_to_archive(reader, keep_batches)
    newest = reader.rows(ArchiveRow, "WHERE last_batch IS NOT NULL ORDER BY last_batch DESC LIMIT 1")
    first = 0 if not newest or newest[0].last_batch is None else newest[0].last_batch + 1
    chosen: list[int] = []
    measured = 0
    for group in reader.rows(GroupRow, WITHOUT_BATCH):
        if group.group_id not in skipped and measured < num_bytes:
            chosen.append(group.group_id)
            measured += TOKEN_BYTES * reader.number(MEASURE.format(group.group_id))
    index = first
    while measured < num_bytes and index < end:
        # Whole batches: the next file begins with the next one.
        for group in reader.rows(GroupRow, OF_BATCH, (index, index)):
            if group.group_id not in skipped:
                chosen.append(group.group_id)
                measured += TOKEN_BYTES * reader.number(MEASURE.format(group.group_id))
        index += 1
    if measured >= num_bytes:
        return Archivable(chosen, 0)
    enough = first + (end - first) * num_bytes // max(1, measured)
    return Archivable([], max(end + 1, min(enough, end + (end - first))))
