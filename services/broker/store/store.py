"""The durable log: SQLite in WAL mode, synchronous=FULL, one connection, one thread, one transaction per round.

One broker writes; others may read at the same time (see reader.py).
"""

import errno
import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from services.broker.rows import ArchivedRow, BatchRow, Row, RunRow, TrajectoryRow
from services.broker.store.commits import Commit, first_commit, write_commit
from services.broker.store.inspection import require_whole
from services.broker.store.lock import LedgerLock, LockHeldError, lock_path
from services.broker.store.mark import MARK_FILE, Mark, MarkFile
from services.broker.store.migration import bring_forward, other_schema
from services.broker.store.payload import CHUNK_COLUMNS, StoredChunk
from services.broker.store.reader import Reader, StoreMismatch
from services.broker.store.schema import CREATE, RUN_KEY, SCHEMA_VERSION, TABLES, row_checksum

FORGET_CHUNKS: Final = (
    "DELETE FROM chunks WHERE trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE group_id = ?)"
)
FORGET_JOURNAL: Final = FORGET_CHUNKS.replace("FROM chunks", "FROM journal")
INSERT_CHUNK: Final = f"INSERT INTO chunks ({CHUNK_COLUMNS}) VALUES ({', '.join('?' * len(CHUNK_COLUMNS.split()))})"
ROWS_AT_ONCE: Final = 16
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

    def __init__(self, path: Path, *, fingerprint: str, run_id: str) -> None:
        """Open, or create with ``run_id``.

        Raises: StoreMismatch for another schema or fingerprint, StoreUnavailable when the file cannot be used, StoreDamaged
        when something that was acknowledged is missing (nothing is written then), StoreCorrupt.
        """
        self.path = path
        self.mark_error = ""
        """Why the newest commit's mark could not be written; empty when it was."""
        self.kept: Path | None = None
        """The ledger as it was before it was brought forward to this release's schema; None when it had it."""
        self._mark: MarkFile | None = None
        self._lock = self._locked()
        try:
            if self._lock is not None:
                require_whole(path)
                self.kept = self._brought_forward()
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

    def _brought_forward(self) -> Path | None:
        """Raises: StoreMismatch when the ledger of an earlier release cannot be one of this release, and stays as it is."""
        try:
            return bring_forward(self.path)
        except ValueError as error:
            raise StoreMismatch(
                f"{self.path}: is of an earlier release and was not brought forward: {error}; continue with that release"
            ) from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            return None  # Not a ledger, or damaged: whoever opens it says so.

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self, fingerprint: str, run_id: str) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
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
        self._connection.execute("COMMIT")
        if version not in (0, SCHEMA_VERSION):
            raise StoreMismatch(f"{self.path}: {other_schema(version)}")
        found = self.meta_value("fingerprint")
        if found != fingerprint:
            raise StoreMismatch(
                f"{self.path}: the run in it has fingerprint {found}, the configuration {fingerprint}: seed, "
                "model, environment, reward.on_deadline or batch settings were changed. Change them back or "
                "choose another directory"
            )
        self.run_id = self.meta_value("run_id")
        self.newest = self.newest_commit()
        if self._lock is not None:
            self._mark = self._opened_mark()

    def _opened_mark(self) -> MarkFile:
        path = self.path.with_name(MARK_FILE)
        try:
            mark = MarkFile(path)
            mark.write(Mark(run_id=self.run_id, commit=self.newest))
        except OSError as error:
            raise StoreUnavailable(
                f"{path}: cannot be written: {error.strerror}; {WAYS_OUT[sqlite3.SQLITE_CANTOPEN]}"
            ) from error
        return mark

    # --- writing --------------------------------------------------------------------------------------------------------

    def commit(self, changes: RowChanges) -> None:
        """Write everything or nothing, durably.

        Raises: StoreUnavailable when nothing was written.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            newest = self._write(changes)
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            raise self._unavailable(error) from error
        except sqlite3.Error:
            self._roll_back()
            raise
        self.newest = newest
        self._write_mark()

    def _write_mark(self) -> None:
        if self._mark is None:
            return
        try:
            self._mark.write(Mark(run_id=self.run_id, commit=self.newest))
        except OSError as error:
            # The commit is durable, and can be acknowledged: without its mark less can be proved of it, and nothing is lost.
            self.mark_error = f"{self._mark.path}: cannot be written: {error.strerror}"
        else:
            self.mark_error = ""

    def _write(self, changes: RowChanges) -> Commit:
        """Returns the commit that these changes make."""
        checksums: list[int] = []
        by_type: dict[type[Row], list[Row]] = {}
        for row in changes.rows:
            by_type.setdefault(type(row), []).append(row)
        for row_type, all_rows in by_type.items():
            rows = _last_of_each(all_rows) if row_type is TrajectoryRow else all_rows
            if row_type is RunRow:
                checksums.append(self._write_meta(RUN_KEY, msgspec.json.encode(rows[-1]).decode()))
            else:
                table = TABLES[row_type]
                values = [table.values(row) for row in rows]
                checksums += [each[-1] for each in values]
                self._insert(table.insert, values)
        # In the same transaction as the row that says where they are now.
        archived = [(row.group_id,) for row in by_type.get(ArchivedRow, []) if isinstance(row, ArchivedRow)]
        self._connection.executemany(FORGET_CHUNKS, archived)
        self._connection.executemany(FORGET_JOURNAL, archived)
        self._insert(INSERT_CHUNK, changes.chunks)
        checksums += [chunk.checksum for chunk in changes.chunks]
        lines = [
            (number, json.dumps(_without_nan(line), allow_nan=False))
            for number, line in enumerate(changes.lines, start=self.newest.records + 1)
        ]
        records = [(*values, row_checksum("records", values)) for values in lines]
        self._connection.executemany("INSERT INTO records (record, line, checksum) VALUES (?, ?, ?)", records)
        checksums += [each[-1] for each in records]
        commit = self.newest.next(
            checksums,
            chunks=len(changes.chunks),
            tokens=sum(chunk.num_tokens for chunk in changes.chunks),
            batches=sum(isinstance(row, BatchRow) for row in changes.rows),
            records=len(lines),
        )
        write_commit(self._connection, commit)
        return commit

    def _insert(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write rows in order, ROWS_AT_ONCE with one statement. ``statement`` writes one."""
        whole = len(rows) - len(rows) % ROWS_AT_ONCE
        for first in range(0, whole, ROWS_AT_ONCE):
            values = list(chain.from_iterable(rows[first : first + ROWS_AT_ONCE]))
            self._connection.execute(_of_many(statement), values)
        self._connection.executemany(statement, rows[whole:])

    def _write_meta(self, key: str, value: str) -> int:
        checksum = row_checksum("meta", (key, value))
        self._connection.execute(
            "INSERT OR REPLACE INTO meta (key, value, checksum) VALUES (?, ?, ?)", (key, value, checksum)
        )
        return checksum

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors (a full disk), and not after others.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def limit_pages(self, max_pages: int) -> None:
        """Let the database grow to ``max_pages`` pages and no further (a quota)."""
        self._connection.execute(f"PRAGMA max_page_count = {max_pages}")

    def _unavailable(self, error: sqlite3.OperationalError) -> StoreUnavailable:
        primary = error.sqlite_errorcode & 0xFF
        way_out = WAYS_OUT.get(primary, "see the message")
        return StoreUnavailable(f"{self.path}: cannot be written: {error}; {way_out}")


@cache
def _of_many(statement: str) -> str:
    """The INSERT of ROWS_AT_ONCE rows."""
    marks = statement[statement.rindex("(") :]
    return statement + f", {marks}" * (ROWS_AT_ONCE - 1)


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of several rows of a trajectory, which many chunks in one round make, the last one."""
    return list({row.trajectory_id: row for row in rows if isinstance(row, TrajectoryRow)}.values())


def _without_nan(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null. A line that could not be written would end the broker, now and at
    each start.
    """
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
