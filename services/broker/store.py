"""The durable log: SQLite in WAL mode, synchronous=FULL, one connection, one thread, one transaction per round."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from services.broker.batches import REMEMBERED
from services.broker.payload import Payload, StoredChunk, join
from services.broker.records import (
    BatchRow,
    EvaluationRow,
    GroupRow,
    Row,
    SettledRow,
    Snapshot,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from services.broker.schema import CREATE, SCHEMA_VERSION, SETTLED_TABLE, TABLES

RowType = TypeVar("RowType", bound=Row)
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


class StoreMismatch(RuntimeError):
    """The file belongs to something else: another schema or another run. The text names both."""


class StoreCorrupt(RuntimeError):
    """What is on disk contradicts itself."""


@dataclass(kw_only=True)
class Changes:
    """What one transaction writes. Of several rows with one key the last counts."""

    rows: list[Row] = field(default_factory=list)
    chunks: list[StoredChunk] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the run's record."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks or self.lines)


class Store:
    """One run's ledger on disk. Not thread-safe: its owner calls it from one thread at a time."""

    def __init__(self, path: Path, *, fingerprint: str, run_id: str) -> None:
        """Open, or create with ``run_id``.

        Raises: StoreMismatch for another schema or fingerprint, StoreUnavailable when the file cannot be used.
        """
        self.path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
        except sqlite3.OperationalError as error:
            raise self._unavailable(error) from error
        try:
            self._open(fingerprint, run_id)
        except sqlite3.OperationalError as error:
            self._connection.close()
            raise self._unavailable(error) from error
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise StoreMismatch(f"{path}: is not a ledger: {error}; move it away or choose another run.directory") from error
        except StoreMismatch:
            self._connection.close()
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def _open(self, fingerprint: str, run_id: str) -> None:
        # Exclusive: a second broker on the same file is refused instead of writing the same epochs.
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
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

    def commit(self, changes: Changes) -> None:
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

    def _write(self, changes: Changes) -> None:
        by_type: dict[type[Row], list[Row]] = {}
        for row in changes.rows:
            by_type.setdefault(type(row), []).append(row)
        for row_type, rows in by_type.items():
            if row_type is SettledRow:
                values = [(0, *SETTLED_TABLE.values(row)) for row in rows]
                self._connection.executemany("INSERT OR REPLACE INTO settled (id, next_batch) VALUES (?, ?)", values)
            else:
                table = TABLES[row_type]
                self._connection.executemany(table.insert, [table.values(row) for row in rows])
        self._connection.executemany(
            "INSERT INTO chunks (trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs) "
            "VALUES (:trajectory_id, :start, :epoch, :num_tokens, :header, :token_ids, :logprobs)",
            [vars(chunk) for chunk in changes.chunks],
        )
        lines = [(json.dumps(line, allow_nan=False),) for line in changes.lines]
        self._connection.executemany("INSERT INTO records (line) VALUES (?)", lines)

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors (a full disk), and not after others.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    # --- reading --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What a ledger goes on from, from the rows alone."""
        groups = self._rows(GroupRow, "WHERE status IN ('open', 'complete') ORDER BY group_id")
        in_play = "(SELECT group_id FROM groups WHERE status IN ('open', 'complete'))"
        trajectories = self._rows(TrajectoryRow, f"WHERE group_id IN {in_play} ORDER BY trajectory_id")
        settled = int(self._one("SELECT max(next_batch) FROM settled", default=0))
        last = int(self._one("SELECT max(batch) FROM batches", default=0))
        versions = self._rows(VersionRow, f"ORDER BY policy_version DESC LIMIT {REMEMBERED}")
        trained = self._rows(TrainedRow, f"ORDER BY policy_version DESC, batch DESC LIMIT {REMEMBERED}")
        dropped = self._connection.execute(
            "SELECT drop_reason, count(*) FROM groups WHERE status = 'dropped' GROUP BY drop_reason"
        )
        return Snapshot(
            groups=tuple(groups),
            trajectories=tuple(trajectories),
            batches=tuple(self._rows(BatchRow, "WHERE batch >= ? ORDER BY batch", (min(settled, last),))),
            versions=tuple(reversed(versions)),
            trained=tuple(reversed(trained)),
            evaluations=tuple(self._rows(EvaluationRow, "ORDER BY evaluation_id")),
            next_batch_settled=settled,
            next_group_id=int(self._one("SELECT max(group_id) + 1 FROM groups", default=0)),
            next_trajectory_id=int(self._one("SELECT max(trajectory_id) + 1 FROM trajectories", default=0)),
            next_prompt=int(self._one("SELECT max(prompt) + 1 FROM groups WHERE split = 'train'", default=0)),
            num_batched_groups=int(self._one("SELECT count(*) FROM groups WHERE status = 'batched'", default=0)),
            num_dropped=dict(dropped.fetchall()),
        )

    def payload(self, trajectory_id: int) -> Payload:
        """All acknowledged tokens of a trajectory."""
        rows = self._connection.execute(
            "SELECT trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs FROM chunks "
            "WHERE trajectory_id = ? ORDER BY start",
            (trajectory_id,),
        )
        return join([_stored(values) for values in rows])

    def batch(self, index: int) -> tuple[BatchRow, list[tuple[TrajectoryRow, Payload]]]:
        """A recorded batch with its trajectories, in its order.

        Raises: StoreCorrupt when a trajectory's tokens are not what its row says.
        """
        (row,) = self._rows(BatchRow, "WHERE batch = ?", (index,))
        items: list[tuple[TrajectoryRow, Payload]] = []
        for group_id in row.group_ids:
            for trajectory in self._rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (group_id,)):
                payload = self.payload(trajectory.trajectory_id)
                if payload.num_tokens != trajectory.num_tokens:
                    raise StoreCorrupt(
                        f"{self.path}: trajectory {trajectory.trajectory_id} has {payload.num_tokens} tokens in its chunks, "
                        f"{trajectory.num_tokens} in its row"
                    )
                items.append((trajectory, payload))
        return row, items

    def records_after(self, number: int) -> list[dict[str, Any]]:
        """Lines of the run's record after line ``number``, in order, each with its own number as "record"."""
        cursor = self._connection.execute("SELECT record, line FROM records WHERE record > ? ORDER BY record", (number,))
        return [{"record": found, **json.loads(line)} for found, line in cursor]

    def elapsed_s(self) -> float:
        """``time_s`` of the last line of the record; 0 without any."""
        found = self._connection.execute("SELECT line FROM records ORDER BY record DESC LIMIT 1").fetchone()
        return 0.0 if found is None else float(json.loads(found[0])["time_s"])

    @property
    def num_bytes(self) -> int:
        """Size of the database, without its write-ahead log."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int(pages) * int(page_bytes)

    def limit_pages(self, max_pages: int) -> None:
        """Let the database grow to ``max_pages`` pages and no further (a quota)."""
        self._connection.execute(f"PRAGMA max_page_count = {max_pages}")

    def _rows(self, row_type: type[RowType], rest: str, parameters: Sequence[Any] = ()) -> list[RowType]:
        table = TABLES[row_type]
        cursor = self._connection.execute(f"SELECT {', '.join(table.columns)} FROM {table.name} {rest}", parameters)
        rows = [table.row(values) for values in cursor]
        return [row for row in rows if isinstance(row, row_type)]

    def _one(self, query: str, default: int) -> int:
        (value,) = self._connection.execute(query).fetchone()
        return default if value is None else int(value)

    def _unavailable(self, error: sqlite3.OperationalError) -> StoreUnavailable:
        primary = error.sqlite_errorcode & 0xFF
        way_out = WAYS_OUT.get(primary, "see the message")
        return StoreUnavailable(f"{self.path}: cannot be written: {error}; {way_out}")


def _stored(values: tuple[Any, ...]) -> StoredChunk:
    trajectory_id, start, epoch, num_tokens, header, token_ids, logprobs = values
    return StoredChunk(
        trajectory_id=trajectory_id,
        start=start,
        epoch=epoch,
        num_tokens=num_tokens,
        header=header,
        token_ids=token_ids,
        logprobs=logprobs,
    )
