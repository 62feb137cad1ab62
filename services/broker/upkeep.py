"""Looks after the ledger's files while the broker works: the mark, the write-ahead log's size, and damage to old rows. Also
after its memory."""

import asyncio
import ctypes
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

import structlog

from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.store import MARK_FILE, WAL_SUFFIX, Scrub, Scrubbed, Store
from gspo_services.shared.runtime.clock import Clock

_LIBC = ctypes.CDLL(None)


def return_freed_memory() -> None:
    """Return freed memory; about a millisecond for 100 MiB. Does nothing if the C library is not glibc.

    glibc keeps what lies below a block that is still in use, and a burst of messages leaves such blocks: for hours a process
    would hold what one flood took, and the next limit on its memory would end it.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


log = structlog.get_logger()
T = TypeVar("T")

LOOK_S: Final = 1.0
TRIM_EVERY_S: Final = 30.0
REST: Final = 19.0
"""Seconds of rest for each second of reading old rows: a twentieth of one core at most."""
LEAST_REST_S: Final = 0.05
PASS_EVERY_S: Final = 3600.0
LOG_BYTES: Final = 256 * 2**20
"""SQLite begins its log again at some 4 MiB, unless a reader holds it."""
REPORT_EVERY_S: Final = 300.0
MOST_TEXTS: Final = 20


class Upkeep:
    """Two loops beside the broker's rounds; both only report, and stop nothing."""

    def __init__(
        self, store: Store, metrics: BrokerMetrics, clock: Clock, wall_s: Callable[[], float], *, log_bytes: int = LOG_BYTES
    ) -> None:
        self._store = store
        self._path = store.path
        self._metrics = metrics
        self._clock = clock
        self._wall_s = wall_s
        self._log_bytes = log_bytes
        self._reported_s = -REPORT_EVERY_S
        self._trimmed_s = clock.now()
        self._mark_error = ""
        self._found = self._damaged = 0
        """Damage that this pass over the rows has found, and that the last whole one found."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upkeep")

    async def run(self) -> None:
        """Look and read, until cancelled.

        produces:     log lines, metrics; a shorter log
        waits for:    its own pauses
        unblocked by: time
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look(), name="upkeep-files")
                tasks.create_task(self._scrub(), name="scrub")
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    async def _look(self) -> None:
        while True:
            await self._in_thread(self.look)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Flush the mark, shorten the write-ahead log when it has grown, and let go of what a burst has left in memory."""
        self._flush_mark()
        if self._clock.now() - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = self._clock.now()
            return_freed_memory()
        num_bytes = _size(self._log_path)
        self._metrics.log_bytes.set(num_bytes)
        if num_bytes > self._log_bytes:
            self._shorten(num_bytes)

    @property
    def _log_path(self) -> Path:
        return self._path.with_name(self._path.name + WAL_SUFFIX)

    def _flush_mark(self) -> None:
        error = self._store.mark_error
        try:
            descriptor = os.open(self._path.with_name(MARK_FILE), os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as failed:
            error = error or f"{MARK_FILE} cannot be flushed: {failed.strerror}"
        if error and error != self._mark_error:
            log.error("mark_not_written", error=error)
        self._mark_error = error
        self._metrics.mark_failing.set(int(bool(error)))

    def _shorten(self, num_bytes: int) -> None:
        """Merge the log into the database, and cut it off if no reader holds it."""
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None, timeout=0.0)) as connection:
                # First without holding up the writer: little is left for the second one, which does.
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            log.warning("log_not_merged", error=str(error))
        left = _size(self._log_path)
        now = self._clock.now()
        if left > self._log_bytes and now - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now
            log.warning(
                "log_grows",
                file=str(self._log_path),
                mib=num_bytes // 2**20,
                way_out="a reader holds it: end the `gspo audit`, `gspo replay` or `gspo backup` that is running or "
                "suspended beside this run, or audit a backup instead",
            )

    async def _scrub(self) -> None:
        scrub = Scrub(self._path)
        while True:
            began = self._clock.now()
            try:
                step = await self._in_thread(scrub.step)
            except sqlite3.OperationalError as error:
                log.warning("scrub_waits", error=str(error))
                await asyncio.sleep(REPORT_EVERY_S)
                continue
            self.report(step)
            await asyncio.sleep(PASS_EVERY_S if step.last else max(LEAST_REST_S, REST * (self._clock.now() - began)))

    def report(self, step: Scrubbed) -> None:
        """Say what a step of the scrub found."""
        for text in step.damage[: max(0, MOST_TEXTS - self._found)]:
            log.error("damage_found", damage=text, way_out="`gspo audit` says what depends on it; a backup may have it")
        self._found += len(step.damage)
        self._metrics.scrubbed_rows.inc(step.rows)
        if step.last:
            log.info("scrubbed", damaged=self._found)
            self._metrics.last_scrub.set(self._wall_s())
            self._damaged, self._found = self._found, 0
        self._metrics.damaged_rows.set(max(self._found, self._damaged))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
