"""The durable log: SQLite in WAL mode, synchronous=FULL, one connection, one thread, one transaction per round.

One broker writes; others may read at the same time (see reader.py).
"""

import errno
import json
import math
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gspo_protocol.messages import LedgerCommit
from gspo_services.broker.rows import Row
from gspo_services.broker.store.commit_log import CommitLog, LedgerDiverged
from gspo_services.broker.store.commits import Commit, first_commit, recent_digests, remember, write_commit
from gspo_services.broker.store.inspection import require_whole
from gspo_services.broker.store.lock import LedgerLock, LockHeldError, lock_path
from gspo_services.broker.store.mark import MARK_FILE, Mark, MarkFile, read_mark
from gspo_services.broker.store.payload import CHUNK_COLUMNS, StoredChunk
from gspo_services.broker.store.reader import NO_ROOM_FOR_INDEX, Reader, StoreMismatch, other_schema
from gspo_services.broker.store.schema import CREATE, LOG_KEY, SCHEMA_VERSION, TABLES, row_checksum
from gspo_services.broker.store.written_rows import WrittenRows, encode_rows, rendered, require_sound

FORGET_CHUNKS: Final = (
    "DELETE FROM chunks WHERE trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE group_id = ?)"
)
FORGET_JOURNAL: Final = FORGET_CHUNKS.replace("FROM chunks", "FROM journal")
INSERT_CHUNK: Final = f"INSERT INTO chunks ({CHUNK_COLUMNS}) VALUES ({', '.join('?' * len(CHUNK_COLUMNS.split()))})"
INSERT_META: Final = "INSERT OR REPLACE INTO meta (key, value, checksum) VALUES (?, ?, ?)"
INSERTS: Final = {"meta": INSERT_META, **{table.name: table.insert for table in TABLES.values()}}
ROWS_AT_ONCE: Final = (64, 8)
"""Rows that one statement writes. With each one this thread gives up the interpreter, and waits until it gets it again."""
WAYS_OUT: Final = {
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_READONLY: "make the file and its directory writable",
    sqlite3.SQLITE_IOERR: "check the disk (it may be full or gone)",
    sqlite3.SQLITE_CANTOPEN: "make its directory exist and writable",
    sqlite3.SQLITE_BUSY: "stop the other broker that uses it",
    sqlite3.SQLITE_LOCKED: "stop the other broker that uses it",
}


class StoreUnavailable(RuntimeError):
    """Nothing was written; trying again may help. The text names the file, the reason and the way out."""


@dataclass(kw_only=True)
class RowChanges:
    """What one transaction writes. Of several rows with the same key the last one counts."""

    rows: list[Row] = field(default_factory=list)
    chunks: list[StoredChunk] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines for metrics.jsonl."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks or self.lines)


class Store(Reader):
    """One run's ledger on disk. Not thread-safe: its owner calls it from one thread at a time."""

    def __init__(self, path: Path, *, fingerprint: str, run_id: str, log: CommitLog | None = None) -> None:
        """Open, or create with ``run_id``. With a ``log`` every commit goes there first, and what is missing here may be
        there: the caller then follows the log, and compares with what is beside the ledger (``require_whole``) after that.

        Raises: StoreMismatch for another schema or fingerprint, StoreUnavailable when the file cannot be used, StoreDamaged
        when something that was acknowledged is missing (nothing is written then), StoreCorrupt.
        """
        self.path = path
        self.mark_error = ""
        """Why the newest commit's mark could not be written; empty when it was."""
        self._log = log
        self._mark: MarkFile | None = None
        self._marked_before = 0
        self._lock = self._locked()
        try:
            if self._lock is not None and log is None:
                require_whole(path)
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except sqlite3.OperationalError as error:
            self._unlock()
            raise self._unavailable(error) from error
        except OSError as error:
            self._unlock()
            raise StoreUnavailable(f"{path}: what is beside it cannot be read: {error}") from error
        except BaseException:
            self._unlock()
            raise
        super().__init__(path, connection)
        try:
            self._open(fingerprint, run_id)
        except sqlite3.OperationalError as error:
            self.close()
            raise self._unavailable(error) from error
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreMismatch(f"{path}: is not a ledger: {error}; move it away or choose another run.directory") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        self._unlock()

    def _locked(self) -> LedgerLock | None:
        """A second broker is refused instead of writing the same epochs."""
        if str(self.path) == ":memory:":
            return None
        try:
            return LedgerLock(self.path)
        except LockHeldError as error:
            raise StoreUnavailable(f"{self.path}: cannot be written: {error}; {WAYS_OUT[sqlite3.SQLITE_BUSY]}") from error
        except OSError as error:
            way_out = WAYS_OUT[sqlite3.SQLITE_FULL if error.errno == errno.ENOSPC else sqlite3.SQLITE_CANTOPEN]
            text = f"{self.path}: cannot be written: {lock_path(self.path)}: {error.strerror}; {way_out}"
            raise StoreUnavailable(text) from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self, fingerprint: str, run_id: str) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        # With a log each commit is durable before it is here. What a power loss takes from the end comes back from there.
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if self._log is None else 'NORMAL'}")
        # Pages of archived tokens are freed as they are: writing zeros into them would write them once more.
        self._connection.execute("PRAGMA secure_delete = OFF")
        self._connection.execute("BEGIN IMMEDIATE")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in CREATE.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for row in (("fingerprint", fingerprint), ("run_id", run_id)):
                self._write_meta(*row)
            write_commit(self._connection, first_commit(run_id))
        if self._log is not None and version in (0, SCHEMA_VERSION):
            self._write_meta(LOG_KEY, "database")
        self._connection.execute("COMMIT")
        if version not in (0, SCHEMA_VERSION):
            raise StoreMismatch(f"{self.path}: {other_schema(version)}, or choose another run.directory for a new run")
        if self._log is None and LOG_KEY in self.meta():
            raise StoreMismatch(
                f"{self.path}: its commits go to a database first, which commits of its own would contradict: set "
                "broker.database as it was. A restored backup of the run (`gspo backup`, `gspo restore`) needs none"
            )
        found = self.meta_value("fingerprint")
        if found != fingerprint:
            raise StoreMismatch(
                f"{self.path}: the run in it has fingerprint {found}, the configuration {fingerprint}: seed, "
                "model, environment, reward or batch settings were changed. Change them back or choose another directory. "
                "If nothing was changed, an earlier release began the run: docs/releases.md says for which runs that counts"
            )
        self.run_id = self.meta_value("run_id")
        self.newest = self.newest_commit()
        self._digests = recent_digests(self._connection)
        if self._lock is not None:
            self._mark = self._opened_mark()

    def _opened_mark(self) -> MarkFile:
        path = self.path.with_name(MARK_FILE)
        try:
            former = read_mark(path) if self._log is not None else None
            # What it knows of, and is missing here, has to come from the log: until then it says what there was.
            self._marked_before = 0 if former is None else former.commit.number
            mark = MarkFile(path)
            if self.newest.number >= self._marked_before:
                mark.write(Mark(run_id=self.run_id, commit=self.newest))
        except OSError as error:
            raise StoreUnavailable(
                f"{path}: cannot be written: {error.strerror}; {WAYS_OUT[sqlite3.SQLITE_CANTOPEN]}"
            ) from error
        return mark

    # --- writing --------------------------------------------------------------------------------------------------------

    def commit(self, changes: RowChanges) -> None:
        """Write everything or nothing, durably. With a log, the log has it first.

        Raises: StoreUnavailable when nothing was acknowledged, and trying again may help; with a log its ServiceErrors, too.
        """
        lines = [json.dumps(_without_nan(line), allow_nan=False) for line in changes.lines]
        written = rendered(changes.rows, changes.chunks, lines, self.newest.lines + 1)
        commit = written.commit_after(self.newest)
        if self._log is None:
            self._make(commit, written)
        else:
            log, before, content = self._log, self.newest, encode_rows(written)
            self._make(commit, written, lambda: log.append(commit, before, content))

    def follow(self, commit: Commit, written: WrittenRows) -> None:
        """Write the next commit of the log, which another broker has made.

        Raises: LedgerDiverged when it does not follow what is here, or is not what was committed; StoreUnavailable.
        """
        try:
            require_sound(written)
        except ValueError as error:
            raise LedgerDiverged(f"{self.path}: commit {commit.number} of the log is damaged: {error}") from error
        made = written.commit_after(self.newest)
        if made != commit:
            raise LedgerDiverged(
                f"{self.path}: is at commit {self.newest.number}, and with the log's next rows would have commit "
                f"{made.number} with digest {made.digest}; the log says commit {commit.number} with digest {commit.digest}. "
                "One of them was restored or changed: move this ledger away, and it is built again from the log; or restore "
                "the log"
            )
        self._make(commit, written)

    def _make(self, commit: Commit, written: WrittenRows, before_it_counts: Callable[[], None] = lambda: None) -> None:
        """Write in one transaction, which ends once ``before_it_counts`` has returned: a commit that the log does not have
        is not here either, and one that only the log has is written when it is tried again."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._write(written)
            write_commit(self._connection, commit)
            before_it_counts()
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            raise self._unavailable(error) from error
        except BaseException:
            self._roll_back()
            raise
        # In memory, because a Hello is answered by another thread than that of the connection.
        remember(self._digests, commit)
        self.newest = commit
        self._write_mark()

    @property
    def told(self) -> LedgerCommit:
        """The newest commit, as peers are told of it."""
        return LedgerCommit(run_id=self.run_id, number=self.newest.number, digest=self.newest.digest)

    def contradiction(self, told: LedgerCommit) -> str:
        """Why this ledger does not continue the one whose commit a peer was ``told`` of; empty when it may.

        A commit is not missed when it is older than the ring, or in the gap that an accepted loss has left.
        """
        newest = self.newest.number
        if told.number > newest:
            return f"it ends at commit {newest}, and this process was told of commit {told.number}"
        if self._digests.get(told.number, told.digest) != told.digest:
            return f"its commit {told.number} is another one than the one that this process was told of"
        return ""

    def _write_mark(self) -> None:
        if self._mark is None or self.newest.number < self._marked_before:
            return
        try:
            self._mark.write(Mark(run_id=self.run_id, commit=self.newest))
        except OSError as error:
            # The commit is durable, and can be acknowledged: without its mark less can be proved of it, and nothing is lost.
            self.mark_error = f"{self._mark.path}: cannot be written: {error.strerror}"
        else:
            self.mark_error = ""

    def _write(self, written: WrittenRows) -> None:
        for table, rows in written.tables:
            self._insert(INSERTS[table], rows)
        # In the same transaction as the row that says where they are now.
        archived = [(group_id,) for group_id in written.archived_groups]
        self._connection.executemany(FORGET_CHUNKS, archived)
        self._connection.executemany(FORGET_JOURNAL, archived)
        self._insert(INSERT_CHUNK, written.chunks)
        self._connection.executemany("INSERT INTO metrics_lines (number, line, checksum) VALUES (?, ?, ?)", written.lines)

    def _insert(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write rows in order, many with one statement. ``statement`` writes one."""
        first = 0
        for number in ROWS_AT_ONCE:
            while len(rows) - first >= number:
                values = list(chain.from_iterable(rows[first : first + number]))
                self._connection.execute(_of_many(statement, number), values)
                first += number
        self._connection.executemany(statement, rows[first:])

    def _write_meta(self, key: str, value: str) -> None:
        self._connection.execute(INSERT_META, (key, value, row_checksum("meta", (key, value))))

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors (a full disk), and not after others.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _unavailable(self, error: sqlite3.OperationalError) -> StoreUnavailable:
        if error.sqlite_errorcode == NO_ROOM_FOR_INDEX:
            full = f"{os.strerror(errno.ENOSPC)}; {WAYS_OUT[sqlite3.SQLITE_FULL]}"
            return StoreUnavailable(f"{self.path}: cannot be written: {error}: {full}")
        primary = error.sqlite_errorcode & 0xFF
        way_out = WAYS_OUT.get(primary, "see the message")
        return StoreUnavailable(f"{self.path}: cannot be written: {error}; {way_out}")


@cache
def _of_many(statement: str, number: int) -> str:
    """The INSERT of so many rows."""
    marks = statement[statement.rindex("(") :]
    return statement + f", {marks}" * (number - 1)


def _without_nan(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null. A line that could not be written would end the broker, now and at
    each start.
    """
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
