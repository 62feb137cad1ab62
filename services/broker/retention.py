"""Moves the tokens of trained batches from the ledger into archive files, in the background."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

import structlog

from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.rows import ArchivedRow
from gspo_services.broker.store import (
    ArchiveDamaged,
    ArchiveWriter,
    Reader,
    RowChanges,
    StoreCorrupt,
    StoreUnavailable,
    batches_to_archive,
    groups_to_archive,
    next_archive,
    remove_unrecorded,
)
from gspo_services.shared.runtime.clock import Clock

log = structlog.get_logger()
T = TypeVar("T")

PAUSE: Final = 3.0
"""Seconds of rest for each second of work: archiving takes a quarter of one core at most."""
RETRY_S: Final = 30.0
BUSY_S: Final = 5.0


class Retention:
    """Keeps the ledger small: tokens of batches that a checkpoint covers go into files, which every reader sees as before.

    A file is complete on the disk before the ledger lets its tokens go, in the one transaction that names it. So a kill at
    any moment leaves every token in the ledger or in a file that the ledger names.
    """

    def __init__(self, path: Path, metrics: BrokerMetrics, clock: Clock, *, keep_batches: int, file_bytes: int) -> None:
        """``path``: the ledger's. ``keep_batches``: the newest ones, which stay in it; 0: all stay. ``file_bytes``: size of
        one file's tokens and log-probs before compression."""
        self._path = path
        self._metrics = metrics
        self._clock = clock
        self._keep_batches = keep_batches
        self._file_bytes = file_bytes
        self._skipped: set[int] = set()
        """Groups whose tokens are damaged: they stay in the ledger, where the audit finds them."""
        self._due_batches = 0
        """With how many batches there may be enough for a file. No groups are chosen before: that reads a row of each that
        waits, and tens of thousands wait where trajectories are short."""
        self._due = asyncio.Event()
        self._due.set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
        self._writer: ArchiveWriter | None = None

    def wake(self) -> None:
        """A checkpoint covers more batches."""
        self._due.set()

    async def run(self, commit: Callable[[RowChanges], Awaitable[None]]) -> None:
        """Write a file whenever there is enough for one, until cancelled.

        produces:     archive files; the transactions that name them, by ``commit``
        waits for:    a checkpoint; its own pauses; the disk
        unblocked by: ``wake``
        """
        if not self._keep_batches:
            return
        try:
            await self._in_thread(self._begin)
            while True:
                await self._due.wait()
                self._due.clear()
                try:
                    while await self._write_file(commit):
                        pass
                except (OSError, StoreUnavailable, StoreCorrupt, ArchiveDamaged, sqlite3.Error) as error:
                    self._metrics.archive_failures.inc()
                    log.error("archive_not_written", error=str(error), retry_s=RETRY_S)
                    await asyncio.sleep(RETRY_S)
                    self._due.set()
        except asyncio.CancelledError:
            self._thread.shutdown(wait=True, cancel_futures=True)  # It may still write.
            if self._writer is not None:
                with suppress(OSError):
                    self._writer.discard()
            raise
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        with suppress(OSError), closing(self._connect()) as connection:
            remove_unrecorded(self._path.parent, next_archive(Reader(self._path, connection)))

    async def _write_file(self, commit: Callable[[RowChanges], Awaitable[None]]) -> bool:
        """Write the next file and let its tokens go. False: there is not enough for one yet."""
        number, group_ids = await self._in_thread(self._plan)
        if not group_ids:
            return False
        writer = self._writer = await self._in_thread(lambda: ArchiveWriter(self._path.parent, number))
        try:
            for group_id in group_ids:
                began = self._clock.now()
                await self._in_thread(lambda: self._add(writer, group_id))  # noqa: B023
                await asyncio.sleep(PAUSE * (self._clock.now() - began))
            if not writer.places:  # All were damaged, and are skipped from now on.
                await self._in_thread(writer.discard)
                return True
            row = await self._in_thread(writer.close)
            archived = [ArchivedRow(group_id=each, archive=number, place=place) for each, place in writer.places.items()]
            await self._in_thread(lambda: writer.publish(row))
            await commit(RowChanges(rows=[row, *archived]))
        # When cancelled, ``run`` does it: the thread may still write. The next broker removes what is published.
        except Exception:
            with suppress(OSError):
                await self._in_thread(writer.discard)
            raise
        self._metrics.archived_trajectories.inc(row.num_trajectories)
        self._metrics.archived_bytes.inc(row.num_bytes)
        fields = {"file": row.name, "trajectories": row.num_trajectories, "tokens": row.num_tokens, "bytes": row.num_bytes}
        log.info("archived", first_batch=row.first_batch, last_batch=row.last_batch, **fields)
        return True

    def _plan(self) -> tuple[int, list[int]]:
        with closing(self._connect()) as connection:
            reader = Reader(self._path, connection)
            if batches_to_archive(reader, self._keep_batches) < self._due_batches:
                return 0, []
            found = groups_to_archive(
                reader, keep_batches=self._keep_batches, num_bytes=self._file_bytes, skipped=self._skipped
            )
            self._due_batches = found.due
            return next_archive(reader), found.group_ids

    def _add(self, writer: ArchiveWriter, group_id: int) -> None:
        try:
            with closing(self._connect()) as connection:
                writer.add(Reader(self._path, connection).archivable(group_id))
        except (ValueError, StoreCorrupt) as error:
            self._skipped.add(group_id)
            log.error("group_not_archived", group_id=group_id, error=str(error))

    def _connect(self) -> sqlite3.Connection:
        # Each query is a separate transaction, so that the write-ahead log can be merged in between.
        uri = f"{self._path.resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
