"""Reads a ledger: what a broker is restored from, and what a batch consists of. store.py writes it."""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar, get_args

import msgspec

from gspo_services.broker.ledger import REMEMBERED
from gspo_services.broker.rows import (
    AdditionRow,
    ArchivedRow,
    ArchiveRow,
    BatchRow,
    CheckpointedRow,
    EvaluationRow,
    FailureRow,
    GroupRow,
    GroupStatus,
    JournalRow,
    LedgerContents,
    LevelRow,
    QuarantinedRow,
    Row,
    RunRow,
    TaskRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from gspo_services.broker.store.archive_file import ArchiveDamaged, ArchivedGroup, ArchiveFiles
from gspo_services.broker.store.commits import Commit, commit_in_past, newest_commit
from gspo_services.broker.store.payload import CHUNK_COLUMNS, Payload, StoredChunk, caught_up, chunk_of_row, join
from gspo_services.broker.store.schema import DROPPED, LAST_BATCH, RUN_KEY, SCHEMA_VERSION, TABLES, TASK_PASSES, row_checksum
from gspo_services.shared.runtime.errors import DiskDamageError
from gspo_services.shared.settings import several_brokers_in

LEDGER_FILE: Final = "ledger.sqlite3"
WAL_SUFFIX: Final = "-wal"
BUSY_S: Final = 5.0
SHELVED: Final = """
SELECT group_id FROM groups WHERE status IN ('quarantined', 'requeued') UNION
SELECT value FROM batches, json_each(batches.group_ids) WHERE batches.batch >= ?
"""
"""Groups that may be quarantined or requeued; the parameter is the first batch that no checkpoint covers."""
GROUP_STATUSES: Final = get_args(GroupStatus)
MOST_GROWTH: Final = 2**30
"""Bytes by which a write-ahead log may grow during one read."""
PROGRESS_STEPS: Final = 1_000_000
"""SQLite's own steps between two looks at the log: some hundredths of a second."""
_NO_TEXT: Final = "Could not decode to UTF-8"
RowType = TypeVar("RowType", bound=Row)
CommitType = TypeVar("CommitType", Commit, Commit | None)


class StoreMismatch(RuntimeError):
    """The file belongs to something else: another schema or another run. The text names both."""


class StoreCorrupt(DiskDamageError):
    """What is on disk contradicts itself; ``gspo audit`` tells how much of it."""


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """Watch for damage to ``path`` that SQLite finds inside the block. Raises: StoreCorrupt with the way out."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # Errors of these subclasses (busy, full, a constraint) are no damage, except for text that is not UTF-8.
        if isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError) and _NO_TEXT not in str(error):
            raise
        raise StoreCorrupt(
            f"{path} is damaged: {error}. Copy the file away before anything else; `gspo audit {path.parent}` says what "
            "cannot be read. Checkpoints and exports do not depend on it: a new run can begin with an export as model.path"
        ) from error


NO_ROOM_FOR_INDEX: Final = sqlite3.SQLITE_IOERR_SHMSIZE
"""What SQLite says of a full disk when it makes the index of its log, which a reader needs, too: "disk I/O error"."""


class NoLedger(ValueError):
    """There is no ledger to read, or not one of this release. The text names the file and the way out."""


class OtherSchema(NoLedger):
    """The ledger is of another release."""


class ReaderGaveWay(NoLedger):
    """A running broker needs the room that a long reader holds."""


class EmptyDatabase(NoLedger):
    """A database without a table: of a broker that was killed at once, or whose write-ahead log is lost."""


@contextmanager
def reading(directory: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to ``directory``'s ledger, in one transaction: the reader sees one state, however long it takes
    and whatever a running broker writes meanwhile.

    A ledger with an unmerged log (of a broker that was killed) in a directory that cannot be written is copied first.
    Raises: NoLedger. Queries raise sqlite3.DatabaseError when the file is damaged.
    """
    if reason := several_brokers_in(directory):
        raise OtherSchema(reason)
    path = directory / LEDGER_FILE
    if not path.is_file():
        raise NoLedger(f"{directory} is no run directory: it has no {LEDGER_FILE}; give the run.directory of a run")
    with reading_file(path) as connection:
        yield connection


@contextmanager
def reading_file(path: Path) -> Iterator[sqlite3.Connection]:
    """The same for a ledger's file, which is there."""
    with TemporaryDirectory(prefix="gspo-ledger-") as scratch:
        connection = _transaction_on(path)
        if connection is None:
            copy = Path(scratch) / LEDGER_FILE
            for suffix in ("", WAL_SUFFIX):
                if path.with_name(path.name + suffix).is_file():
                    copyfile(f"{path}{suffix}", f"{copy}{suffix}")
            connection = _transaction_on(copy)
        if connection is None:
            raise NoLedger(f"{path}: cannot be opened, and neither can a copy of it; is there room in {scratch}?")
        try:
            _require_schema(path, connection)
            _give_way(connection, path.with_name(path.name + WAL_SUFFIX))
            yield connection
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            raise ReaderGaveWay(
                f"{path}: the run has written {MOST_GROWTH / 2**30:.3g} GiB beside this reader, and cannot merge its log "
                "meanwhile: read a copy (`gspo backup`), or wait until the run has ended"
            ) from error
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError(f"{path} is damaged, and SQLite's message about it is not text") from error
        finally:
            connection.close()


def _give_way(connection: sqlite3.Connection, log: Path) -> None:
    """Interrupt a query while which the log has grown by MOST_GROWTH: a running broker's disk comes before a reader."""

    def size() -> int:
        return log.stat().st_size if log.exists() else 0

    most = size() + MOST_GROWTH
    connection.set_progress_handler(lambda: int(size() > most), PROGRESS_STEPS)


def _transaction_on(path: Path) -> sqlite3.Connection | None:
    """Begin a transaction. None: SQLite cannot write next to the file. Raises: NoLedger if it is not a database."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=BUSY_S)
    try:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        code = error.sqlite_errorcode
        if code & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or code == NO_ROOM_FOR_INDEX:
            return None
        raise NoLedger(f"{path}: cannot be read: {error}") from error
    # UnicodeDecodeError: SQLite's own message quotes what is broken in the file.
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        connection.close()
        raise NoLedger(f"{path} is not a ledger: {error}") from error
    return connection


def other_schema(version: int) -> str:
    """Why this release cannot use a ledger whose schema number is ``version``, and what can."""
    writer = "a newer" if version > SCHEMA_VERSION else "an older"
    return f"schema {version}, this release reads {SCHEMA_VERSION}: {writer} release has written it; use that release"


def _require_schema(path: Path, connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        raise EmptyDatabase(f"{path}: an empty database, not a ledger")
    if version != SCHEMA_VERSION:
        raise OtherSchema(f"{path}: {other_schema(version)}")


class Reader:
    """Rows and tokens of one ledger, through a connection that the caller opens and closes."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """``path`` is named in errors."""
        self.path = path
        self._connection = connection
        self._archives = ArchiveFiles(path.parent)
        self._archive_rows: dict[int, ArchiveRow] = {}

    def contents(self) -> LedgerContents:
        """What a ledger is restored from: the rows alone."""
        in_play = "(SELECT group_id FROM groups WHERE status IN ('open', 'complete'))"
        self._require_known_statuses()
        checkpointed = max((row.next_batch for row in self.rows(CheckpointedRow, "")), default=0)
        shelved = f"group_id IN ({SHELVED})"
        return LedgerContents(
            groups=tuple(self.rows(GroupRow, "WHERE status IN ('open', 'complete') ORDER BY group_id")),
            trajectories=tuple(self.rows(TrajectoryRow, f"WHERE group_id IN {in_play} ORDER BY trajectory_id")),
            batches=tuple(self.rows(BatchRow, f"WHERE batch >= min(?, {LAST_BATCH}) ORDER BY batch", (checkpointed,))),
            versions=tuple(reversed(self.rows(VersionRow, f"ORDER BY policy_version DESC LIMIT {REMEMBERED}"))),
            trained=tuple(reversed(self.rows(TrainedRow, f"ORDER BY policy_version DESC, batch DESC LIMIT {REMEMBERED}"))),
            evaluations=tuple(self.rows(EvaluationRow, "ORDER BY evaluation_id")),
            failures=tuple(self.rows(FailureRow, "WHERE batch >= ? ORDER BY batch", (checkpointed,))),
            quarantined=tuple(self.rows(QuarantinedRow, "ORDER BY batch")),
            shelved_groups=tuple(self.rows(GroupRow, f"WHERE {shelved} ORDER BY group_id", (checkpointed,))),
            shelved_trajectories=tuple(self.rows(TrajectoryRow, f"WHERE {shelved} ORDER BY trajectory_id", (checkpointed,))),
            tasks=tuple(self.rows(TaskRow, "ORDER BY task_index")),
            levels=tuple(self.rows(LevelRow, "ORDER BY ladder")),
            additions=tuple(self.rows(AdditionRow, "ORDER BY number")),
            run=self._run(),
            next_batch_checkpointed=checkpointed,
            next_group_id=int(self.number("SELECT max(group_id) + 1 FROM groups", default=0)),
            next_trajectory_id=int(self.number("SELECT max(trajectory_id) + 1 FROM trajectories", default=0)),
            next_prompt=int(self.number("SELECT max(prompt) + 1 FROM groups WHERE split = 'train'", default=0)),
            num_batched_groups=int(self.number("SELECT count(*) FROM groups WHERE status = 'batched'", default=0)),
            num_filtered_groups=self.number("SELECT count(*) FROM groups WHERE status = 'filtered'"),
            task_passes=dict(self._select(TASK_PASSES)),
            num_dropped=dict(self._select(DROPPED)),
        )

    def _require_known_statuses(self) -> None:
        """A group whose status is no known one would be left out in silence."""
        for status, number in self._select("SELECT status, count(*) FROM groups GROUP BY status"):
            if status not in GROUP_STATUSES:
                raise StoreCorrupt(
                    f"{self.path}: {number} groups have the status {status!r:.40}, which was changed on the disk"
                )

    def _run(self) -> RunRow:
        found = self.meta().get(RUN_KEY)
        try:
            return RunRow() if found is None else msgspec.json.decode(found, type=RunRow)
        except msgspec.MsgspecError as error:
            raise StoreCorrupt(f"{self.path}: what is known of the run cannot be read: {error}") from error

    def meta(self) -> dict[str, str]:
        """What is known about the run and its file, by key. Raises: StoreCorrupt."""
        found = {}
        for key, value, checksum in self._select("SELECT key, value, checksum FROM meta"):
            if row_checksum("meta", (key, value)) != checksum:
                raise StoreCorrupt(f"{self.path}: the row {key!r:.40} of meta was changed on the disk")
            found[key] = value
        return found

    def newest_commit(self) -> Commit:
        """How far the ledger has come. Raises: StoreCorrupt."""
        return self._of_commits(newest_commit)

    def commit_in_past(self, number: int) -> Commit | None:
        """The commit of this number; None when it is too long ago, or was never made. Raises: StoreCorrupt."""
        return self._of_commits(lambda connection: commit_in_past(connection, number))

    def _of_commits(self, read: Callable[[sqlite3.Connection], CommitType]) -> CommitType:
        with refusing_damage(self.path):
            try:
                return read(self._connection)
            except (ValueError, TypeError) as error:
                raise StoreCorrupt(f"{self.path}: {error}") from error

    def meta_value(self, key: str) -> str:
        """A value that every ledger has. Raises: StoreCorrupt when this one has not."""
        found = self.meta().get(key)
        if found is None:
            raise StoreCorrupt(f"{self.path}: the row {key!r} of meta is missing, which every ledger has")
        return found

    def payload(self, trajectory_id: int) -> Payload:
        """All acknowledged tokens of a trajectory. Raises: StoreCorrupt when they are not what was acknowledged."""
        rows = self.chunks(trajectory_id)
        try:
            return join(rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreCorrupt(f"{self.path}: {error}") from error

    def journal(self, trajectory_id: int) -> list[bytes]:
        """The entries of a trajectory's journal, in order. Raises: StoreCorrupt when one is missing."""
        rows = self.rows(JournalRow, "WHERE trajectory_id = ? ORDER BY place", (trajectory_id,))
        if [row.place for row in rows] != list(range(len(rows))):
            raise StoreCorrupt(f"{self.path}: the journal of trajectory {trajectory_id} lacks entries")
        return [row.entry for row in rows]

    def resumable(self, trajectory_id: int) -> tuple[Payload, list[bytes]]:
        """What a trajectory goes on from: its tokens and its journal. Raises: StoreCorrupt."""
        return self.payload(trajectory_id), self.journal(trajectory_id)

    def chunks(self, trajectory_id: int, begin: int = 0, end: int = 2**62) -> list[StoredChunk]:
        """A trajectory's chunks in order, from ledger or archive: those of tokens [begin, end). Raises: StoreCorrupt."""
        where = "WHERE trajectory_id = ? AND start < ? AND start + num_tokens > ? ORDER BY start"
        rows = self._select(f"SELECT {CHUNK_COLUMNS} FROM chunks {where}", (trajectory_id, end, begin))
        if rows:
            return [chunk_of_row(values) for values in rows]
        where = "WHERE group_id = (SELECT group_id FROM trajectories WHERE trajectory_id = ?)"
        archived = self.rows(ArchivedRow, where, (trajectory_id,))
        found = self.archived_chunks(archived[0], trajectory_id) if archived else []
        return [chunk for chunk in found if chunk.start < end and chunk.start + chunk.num_tokens > begin]

    def _chunks_after(self, trajectory_id: int, start: int) -> list[StoredChunk]:
        query = f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE trajectory_id = ? AND start >= ? ORDER BY start"
        return [chunk_of_row(values) for values in self._select(query, (trajectory_id, start))]

    def archived_chunks(self, place: ArchivedRow, trajectory_id: int) -> list[StoredChunk]:
        """The chunks of a trajectory whose group is archived. Raises: StoreCorrupt."""
        if place.archive not in self._archive_rows:
            self._archive_rows.update({row.archive: row for row in self.rows(ArchiveRow, "ORDER BY archive")})
        archive = self._archive_rows.get(place.archive)
        if archive is None:
            raise StoreCorrupt(f"{self.path}: group {place.group_id} is in archive {place.archive}, which is not there")
        try:
            return self._archives.chunks(archive, place.place, trajectory_id)
        except ArchiveDamaged as error:
            raise StoreCorrupt(f"{error}. A backup may have it: `gspo restore --help`") from error

    def archivable(self, group_id: int) -> ArchivedGroup:
        """A group with all its chunks. Raises: StoreCorrupt."""
        (group,) = self.rows(GroupRow, "WHERE group_id = ?", (group_id,))
        members = self.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (group_id,))
        return ArchivedGroup(group=group, members=[(row, self.chunks(row.trajectory_id)) for row in members])

    def batch_row(self, index: int) -> BatchRow:
        """A recorded batch. Raises: StoreCorrupt when it is not there."""
        for row in self.rows(BatchRow, "WHERE batch = ?", (index,)):
            return row
        raise StoreCorrupt(f"{self.path}: batch {index} is not there")

    def batch(self, index: int) -> tuple[BatchRow, list[tuple[TrajectoryRow, Payload]]]:
        """A recorded batch with its trajectories, in its order.

        Raises: StoreCorrupt when a trajectory's tokens are not what its row says.
        """
        return (row := self.batch_row(index)), self.members(row.group_ids)

    def members(self, group_ids: Sequence[int]) -> list[tuple[TrajectoryRow, Payload]]:
        """The trajectories of groups, in the order of the groups, with their tokens. Raises: StoreCorrupt."""
        items: list[tuple[TrajectoryRow, Payload]] = []
        for group_id in group_ids:
            for trajectory in self.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (group_id,)):
                payload = self.payload(trajectory.trajectory_id)
                if payload.num_tokens != trajectory.num_tokens:
                    raise StoreCorrupt(
                        f"{self.path}: trajectory {trajectory.trajectory_id} has {payload.num_tokens} tokens in its chunks, "
                        f"{trajectory.num_tokens} in its row"
                    )
                items.append((trajectory, payload))
        return items

    def quarantined(self) -> dict[int, QuarantinedRow]:
        """The batches that were quarantined, by index."""
        return {row.index: row for row in self.rows(QuarantinedRow, "ORDER BY batch")}

    def metrics_after(self, number: int, last: int = 2**62) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl after line ``number``, up to line ``last``, each with its own number as "line"."""
        query = "SELECT number, line, checksum FROM metrics_lines WHERE number > ? AND number <= ? ORDER BY number"
        return [{"line": found[0], **self._line(*found)} for found in self._select(query, (number, last))]

    def elapsed_s(self) -> float:
        """``time_s`` of the last line of metrics.jsonl; 0 without any."""
        found = self._select("SELECT number, line, checksum FROM metrics_lines ORDER BY number DESC LIMIT 1")
        if not found:
            return 0.0
        time_s = self._line(*found[0]).get("time_s")
        if not isinstance(time_s, int | float):
            raise StoreCorrupt(f"{self.path}: the last line for metrics.jsonl has time_s {time_s!r:.100}")
        return float(time_s)

    @property
    def num_bytes(self) -> int:
        """Size of the database, without its write-ahead log."""
        ((pages,),), ((page_bytes,),) = (self._select(f"PRAGMA {name}") for name in ("page_count", "page_size"))
        return int(pages) * int(page_bytes)

    def rows(self, row_type: type[RowType], rest: str, parameters: Sequence[Any] = ()) -> list[RowType]:
        """Rows of one table, with what their chunks add; ``rest`` follows its name in the SELECT."""
        table = TABLES[row_type]
        try:
            found = self._select(f"SELECT {', '.join(table.stored_columns)} FROM {table.name} {rest}", parameters)
            return [row for row in caught_up(map(table.row, found), self._chunks_after) if isinstance(row, row_type)]
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreCorrupt(f"{self.path}: a row of {table.name} cannot be read: {error}") from error

    def _line(self, number: object, text: object, checksum: object) -> dict[str, Any]:
        if row_checksum("metrics_lines", (number, text)) != checksum:
            raise StoreCorrupt(f"{self.path}: line {number!r:.20} for metrics.jsonl was changed on the disk")
        try:
            line = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError) as error:
            raise StoreCorrupt(f"{self.path}: a line for metrics.jsonl is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise StoreCorrupt(f"{self.path}: a line for metrics.jsonl is {line!r:.100}, expected an object")
        return line

    def _select(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with refusing_damage(self.path):
            return self._connection.execute(query, parameters).fetchall()

    def number(self, query: str, default: int = 0) -> int:
        """The one number that ``query`` gives; ``default`` when it gives NULL. Raises: StoreCorrupt."""
        ((value,),) = self._select(query)
        if value is not None and not isinstance(value, int):
            raise StoreCorrupt(f"{self.path}: {value!r:.100} where a number should be ({query})")
        return default if value is None else value
