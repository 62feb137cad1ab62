"""Tables of the store, and how rows become columns."""

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgspec

from gspo_services.broker.rows import (
    AdditionRow,
    ArchivedRow,
    ArchiveRow,
    BatchRow,
    CheckpointedRow,
    EvaluationRow,
    FailureRow,
    GroupRow,
    JournalRow,
    LevelRow,
    QuarantinedRow,
    Row,
    TaskRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)

SCHEMA_VERSION: Final = 2
"""Raised with each change of a table or of what a column means: a ledger with another number is refused."""
DROPPED: Final = "SELECT drop_reason, count(*) FROM groups WHERE status = 'dropped' GROUP BY drop_reason"
TASK_PASSES: Final = """
SELECT task_index, passed FROM (
    SELECT g.task_index, g.group_id, max(g.group_id) OVER (PARTITION BY g.task_index) AS last,
        avg((SELECT total(value) FROM json_each(t.turn_rewards)) > 0) AS passed
    FROM groups g JOIN trajectories t USING (group_id)
    WHERE g.split = 'train' AND g.batch IS NOT NULL
        AND EXISTS (SELECT 1 FROM groups WHERE split = 'train' AND task_index != prompt) GROUP BY g.group_id
) WHERE group_id = last
"""
"""By training task: the share of its newest batched group whose reward is positive. Nothing where each prompt is a task of
its own, which never comes again."""
LAST_BATCH: Final = "(SELECT coalesce(max(batch), 0) FROM batches)"
RECENT_COMMITS: Final = 4096
"""Commits whose digests the ledger keeps: more than a mark beside it can be behind after a power loss."""
CREATE: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, split TEXT NOT NULL, prompt INTEGER NOT NULL, task_index INTEGER NOT NULL,
    evaluation INTEGER, status TEXT NOT NULL, sampling TEXT NOT NULL, batch INTEGER, drop_reason TEXT, replaces INTEGER,
    checksum INTEGER NOT NULL
);
CREATE INDEX groups_by_status ON groups (status);
CREATE TABLE trajectories (
    trajectory_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, status TEXT NOT NULL, epoch INTEGER NOT NULL,
    holder_peer TEXT NOT NULL, holder_session TEXT NOT NULL, lease_version INTEGER NOT NULL, lease_start INTEGER NOT NULL,
    attempts INTEGER NOT NULL, lost_by TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_action_tokens INTEGER NOT NULL,
    version_sum INTEGER NOT NULL, min_version INTEGER NOT NULL, num_turns INTEGER NOT NULL, num_segments INTEGER NOT NULL,
    num_runs INTEGER NOT NULL, last_version INTEGER NOT NULL, last_sequence INTEGER NOT NULL, sequences TEXT NOT NULL,
    num_entries INTEGER NOT NULL, journal_bytes INTEGER NOT NULL, reward_size REAL NOT NULL, finish_reason TEXT,
    turn_rewards TEXT NOT NULL, discarded_turns TEXT NOT NULL, components TEXT NOT NULL, turn_roles TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE TABLE chunks (
    trajectory_id INTEGER NOT NULL, start INTEGER NOT NULL, epoch INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    header BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, checksum INTEGER NOT NULL
);
CREATE UNIQUE INDEX chunks_in_order ON chunks (trajectory_id, start);
CREATE TABLE journal (
    trajectory_id INTEGER NOT NULL, place INTEGER NOT NULL, entry BLOB NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (trajectory_id, place)
) WITHOUT ROWID;
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, group_ids TEXT NOT NULL, stats TEXT NOT NULL,
    samplings TEXT NOT NULL, vals TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE versions (
    policy_version INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, digest TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    trained_batches INTEGER NOT NULL, vocabulary INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE trained (
    batch INTEGER NOT NULL, policy_version INTEGER NOT NULL, how TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (batch, policy_version)
) WITHOUT ROWID;
CREATE TABLE failures (
    batch INTEGER PRIMARY KEY, reported INTEGER NOT NULL, silent INTEGER NOT NULL, session TEXT NOT NULL,
    reason TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE quarantined (
    batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, reason TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE evaluations (
    evaluation_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, batch INTEGER NOT NULL,
    num_tasks INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, num_finished INTEGER NOT NULL,
    num_failed INTEGER NOT NULL, name TEXT NOT NULL, samples INTEGER NOT NULL, score REAL, checksum INTEGER NOT NULL
);
CREATE TABLE tasks (
    task_index INTEGER PRIMARY KEY, num_zero_advantage INTEGER NOT NULL, rests_until INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE levels (
    ladder INTEGER PRIMARY KEY, level INTEGER NOT NULL, num_groups INTEGER NOT NULL, solved REAL NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE additions (
    number INTEGER PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, first_task INTEGER NOT NULL,
    num_tasks INTEGER NOT NULL, at_draw INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE archives (
    archive INTEGER PRIMARY KEY, name TEXT NOT NULL, num_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
    num_groups INTEGER NOT NULL, num_trajectories INTEGER NOT NULL, num_tokens INTEGER NOT NULL, first_batch INTEGER,
    last_batch INTEGER, checksum INTEGER NOT NULL
);
CREATE TABLE archived (
    group_id INTEGER PRIMARY KEY, archive INTEGER NOT NULL, place INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE checkpointed (
    id INTEGER NOT NULL DEFAULT 0 UNIQUE CHECK (id = 0), next_batch INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE metrics_lines (number INTEGER PRIMARY KEY, line TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE commits (
    slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, digest TEXT NOT NULL, chunks INTEGER NOT NULL,
    tokens INTEGER NOT NULL, batches INTEGER NOT NULL, lines INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE losses (loss INTEGER PRIMARY KEY, line TEXT NOT NULL, checksum INTEGER NOT NULL);
"""
"""Tokens and log-probs are raw little-endian int32 and float32; a chunk's header is msgpack.

The last column of every row is a checksum over the others: SQLite does not notice when a disk changes a byte of them.
commits: the last RECENT_COMMITS, in a ring (see commits.py). losses: what was lost and accepted, as JSON.
"""


def row_checksum(table: str, values: tuple[Any, ...]) -> int:
    """CRC-32 of a row's columns, in the table's order, as SQLite gives them back."""
    return zlib.crc32(_ENCODER.encode(values), zlib.crc32(table.encode()))


_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Table:
    """Where the rows of one type live. ``renamed``: columns that cannot have their field's name in SQL."""

    name: str
    row_type: type[Row]
    renamed: dict[str, str]
    json_fields: frozenset[str]
    real_fields: frozenset[str] = frozenset()
    """Fields with a REAL column: SQLite returns a float, whatever was stored."""

    @property
    def fields(self) -> tuple[str, ...]:
        # Not ``msgspec.structs.fields``, which evaluates annotations: 0.2 ms for each row that is written.
        return self.row_type.__struct_fields__

    @property
    def columns(self) -> list[str]:
        return [self.renamed.get(name, name) for name in self.fields]

    @property
    def stored_columns(self) -> list[str]:
        """The columns, and the checksum over them."""
        return [*self.columns, CHECKSUM]

    @property
    def insert(self) -> str:
        marks = ", ".join("?" for _ in self.stored_columns)
        return f"INSERT OR REPLACE INTO {self.name} ({', '.join(self.stored_columns)}) VALUES ({marks})"

    def values(self, row: Row) -> tuple[Any, ...]:
        """The row's columns, with their checksum at the end."""
        columns = list(msgspec.structs.astuple(row))
        for place in self._json_places:
            columns[place] = _as_json(columns[place])
        for place in self._real_places:
            # Adding zero: SQLite stores -0.0 as 0.
            columns[place] = None if columns[place] is None else float(columns[place]) + 0.0
        values = tuple(columns)
        return *values, row_checksum(self.name, values)

    @cached_property
    def _json_places(self) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.fields) if name in self.json_fields)

    @cached_property
    def _real_places(self) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.fields) if name in self.real_fields)

    def row(self, stored: tuple[Any, ...]) -> Row:
        """The row of what ``values`` made. Raises: ValueError when it is something else now."""
        *columns, checksum = stored
        values = tuple(columns)
        if row_checksum(self.name, values) != checksum:
            raise ValueError(f"{values!r:.200} was changed on the disk: its checksum is another")
        plain = {
            name: json.loads(value) if name in self.json_fields else value
            for name, value in zip(self.fields, values, strict=True)
        }
        return msgspec.convert(plain, self.row_type)


def _table(
    name: str, row_type: type[Row], *, json_fields: tuple[str, ...] = (), real_fields: tuple[str, ...] = (), **renamed: str
) -> Table:
    return Table(name, row_type, renamed, frozenset(json_fields), frozenset(real_fields))


def _as_json(value: Any) -> str:
    """A trajectory's row is written with each of its chunks, and nearly all of these columns are empty then."""
    if value == ():
        return "[]"
    return "{}" if value == {} else json.dumps(msgspec.to_builtins(value))


CHECKSUM: Final = "checksum"
TABLES: Final[dict[type[Row], Table]] = {
    table.row_type: table
    for table in (
        _table("groups", GroupRow, json_fields=("sampling",)),
        _table(
            "trajectories",
            TrajectoryRow,
            json_fields=("lost_by", "sequences", "turn_rewards", "discarded_turns", "components", "turn_roles"),
            real_fields=("reward_size",),
        ),
        _table("journal", JournalRow),
        _table("batches", BatchRow, json_fields=("group_ids", "stats", "samplings", "values"), index="batch", values="vals"),
        _table("versions", VersionRow),
        _table("trained", TrainedRow, index="batch"),
        _table("failures", FailureRow, index="batch"),
        _table("quarantined", QuarantinedRow, index="batch"),
        _table("tasks", TaskRow),
        _table("levels", LevelRow, real_fields=("solved",)),
        _table("additions", AdditionRow),
        _table("archives", ArchiveRow),
        _table("archived", ArchivedRow),
        _table("evaluations", EvaluationRow, real_fields=("reward", "score")),
        _table("checkpointed", CheckpointedRow),
    )
}
RUN_KEY: Final = "run"
"""Key of the RunRow, as JSON, in the table meta."""
LOG_KEY: Final = "log"
"""Key, in the table meta, of a ledger whose commits go to a log first: it must not be written without the log."""


def checked_columns() -> dict[str, list[str]]:
    """The columns that each table's checksums cover, chunks apart (see payload.py)."""
    return {
        **{table.name: table.columns for table in TABLES.values()},
        "meta": ["key", "value"],
        "metrics_lines": ["number", "line"],
        "commits": ["slot", "number", "digest", "chunks", "tokens", "batches", "lines"],
        "losses": ["loss", "line"],
    }
