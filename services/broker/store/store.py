"""The durable log: SQLite in WAL mode, synchronous=FULL, one connection, one thread, one transaction per round.

One broker writes; others may read at the same time (see reader.py).
"""

import fcntl
import json
import math
import os
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from services.broker.rows import ArchivedRow, CheckpointedRow, Row, RunRow
from services.broker.store.payload import StoredChunk
from services.broker.store.reader import Reader, StoreMismatch
from services.broker.store.schema import CHECKPOINTED_TABLE, CREATE, RUN_KEY, SCHEMA_VERSION, TABLES

LOCK_SUFFIX: Final = "-lock"
LOCK_WAIT_S: Final = 2.0
"""How long to wait for a broker that is just ending."""
LOCK_PAUSE_S: Final = 0.1
FORGET_CHUNKS: Final = (
    "DELETE FROM chunks WHERE trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE group_id = ?)"
)
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

        Raises: StoreMismatch for another schema or fingerprint, StoreUnavailable when the file cannot be used.
        """
        self.path = path
        self._lock = self._locked()
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except sqlite3.OperationalError as error:
            self._unlock()
            raise self._unavailable(error) from error
        super().__init__(path, connection)
        try:
            self._open(fingerprint, run_id)
        except sqlite3.OperationalError as error:
            self.close()
            raise self._unavailable(error) from error
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreMismatch(f"{path}: is not a ledger: {error}; move it away or choose another run.directory") from error
        except StoreMismatch:
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
        self._unlock()

    def _locked(self) -> int | None:
        """A lock on a file of its own, held as long as this store is open: a second broker is refused instead of writing the
        same epochs. SQLite's own exclusive mode would keep readers out too.
        """
        if str(self.path) == ":memory:":
            return None
        lock = Path(f"{self.path}{LOCK_SUFFIX}")
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            way_out = WAYS_OUT[sqlite3.SQLITE_CANTOPEN]
            raise StoreUnavailable(f"{self.path}: cannot be written: {lock}: {error.strerror}; {way_out}") from error
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_PAUSE_S)
                    continue
                os.close(descriptor)
                way_out = WAYS_OUT[sqlite3.SQLITE_BUSY]
                raise StoreUnavailable(f"{self.path}: cannot be written: {lock} is held; {way_out}") from error
            return descriptor

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
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
            meta = [("fingerprint", fingerprint), ("run_id", run_id)]
            self._connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta)
        self._connection.execute("COMMIT")
        if version not in (0, SCHEMA_VERSION):
            raise StoreMismatch(
                f"{self.path}: schema {version}, this release uses {SCHEMA_VERSION}: continue the run with the release that "
                "began it, or choose another run.directory"
            )
        found: dict[str, str] = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        if found["fingerprint"] != fingerprint:
            raise StoreMismatch(
                f"{self.path}: the run in it has fingerprint {found['fingerprint']}, the configuration {fingerprint}: seed, "
                "model, environment, sampling or batch settings were changed. Change them back or choose another directory"
            )
        self.run_id = found["run_id"]

    # --- writing --------------------------------------------------------------------------------------------------------

    def commit(self, changes: RowChanges) -> None:
        """Write everything or nothing, durably.

        Raises: StoreUnavailable when nothing was written.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._write(changes)
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            raise self._unavailable(error) from error
        except sqlite3.Error:
            self._roll_back()
            raise

    def _write(self, changes: RowChanges) -> None:
        by_type: dict[type[Row], list[Row]] = {}
        for row in changes.rows:
            by_type.setdefault(type(row), []).append(row)
        for row_type, rows in by_type.items():
            if row_type is RunRow:
                run = (RUN_KEY, msgspec.json.encode(rows[-1]).decode())
                self._connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", run)
            elif row_type is CheckpointedRow:
                values = [(0, *CHECKPOINTED_TABLE.values(row)) for row in rows]
                self._connection.executemany("INSERT OR REPLACE INTO checkpointed (id, next_batch) VALUES (?, ?)", values)
            else:
                table = TABLES[row_type]
                self._connection.executemany(table.insert, [table.values(row) for row in rows])
        # In the same transaction as the row that says where they are now.
        archived = [(row.group_id,) for row in by_type.get(ArchivedRow, []) if isinstance(row, ArchivedRow)]
        self._connection.executemany(FORGET_CHUNKS, archived)
        self._connection.executemany(
            "INSERT INTO chunks (trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs, checksum) "
            "VALUES (:trajectory_id, :start, :epoch, :num_tokens, :header, :token_ids, :logprobs, :checksum)",
            [vars(chunk) for chunk in changes.chunks],
        )
        lines = [(json.dumps(_without_nan(line), allow_nan=False),) for line in changes.lines]
        self._connection.executemany("INSERT INTO records (line) VALUES (?)", lines)

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


def _without_nan(line: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become null. A line that could not be written would end the broker, now and at
    each start.
    """
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
