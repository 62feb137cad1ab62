"""Tables of the store, and how rows become columns."""

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.broker.rows import (
    ArchivedRow,
    ArchiveRow,
    BatchRow,
    CheckpointedRow,
    EvaluationRow,
    FailureRow,
    GroupRow,
    Row,
    SetAsideRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)

SCHEMA_VERSION: Final = 4
CREATE: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, split TEXT NOT NULL, prompt INTEGER NOT NULL, task_index INTEGER NOT NULL,
    evaluation INTEGER, status TEXT NOT NULL, batch INTEGER, drop_reason TEXT, replaces INTEGER
);
CREATE INDEX groups_by_status ON groups (status);
CREATE TABLE trajectories (
    trajectory_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, status TEXT NOT NULL, epoch INTEGER NOT NULL,
    holder_peer TEXT NOT NULL, holder_session TEXT NOT NULL, lease_version INTEGER NOT NULL, lease_start INTEGER NOT NULL,
    attempts INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_action_tokens INTEGER NOT NULL,
    version_sum INTEGER NOT NULL, min_version INTEGER NOT NULL, num_turns INTEGER NOT NULL, num_segments INTEGER NOT NULL,
    num_runs INTEGER NOT NULL, last_version INTEGER NOT NULL, reward_size REAL NOT NULL, finish_reason TEXT,
    turn_rewards TEXT NOT NULL
);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE TABLE chunks (
    trajectory_id INTEGER NOT NULL, start INTEGER NOT NULL, epoch INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    header BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, checksum INTEGER NOT NULL
);
CREATE UNIQUE INDEX chunks_in_order ON chunks (trajectory_id, start);
CREATE TABLE batches (
    batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, group_ids TEXT NOT NULL, stats TEXT NOT NULL
);
CREATE TABLE versions (
    policy_version INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, digest TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    trained_batches INTEGER NOT NULL, vocabulary INTEGER NOT NULL
);
CREATE TABLE trained (
    batch INTEGER NOT NULL, policy_version INTEGER NOT NULL, how TEXT NOT NULL, PRIMARY KEY (batch, policy_version)
) WITHOUT ROWID;
CREATE TABLE failures (
    batch INTEGER PRIMARY KEY, reported INTEGER NOT NULL, silent INTEGER NOT NULL, session TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE TABLE set_aside (batch INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE evaluations (
    evaluation_id INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, batch INTEGER NOT NULL,
    num_tasks INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, num_finished INTEGER NOT NULL,
    num_failed INTEGER NOT NULL
);
CREATE TABLE archives (
    archive INTEGER PRIMARY KEY, name TEXT NOT NULL, num_bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
    num_groups INTEGER NOT NULL, num_trajectories INTEGER NOT NULL, num_tokens INTEGER NOT NULL, first_batch INTEGER,
    last_batch INTEGER
);
CREATE TABLE archived (group_id INTEGER PRIMARY KEY, archive INTEGER NOT NULL, place INTEGER NOT NULL);
CREATE TABLE checkpointed (id INTEGER PRIMARY KEY CHECK (id = 0), next_batch INTEGER NOT NULL);
CREATE TABLE records (record INTEGER PRIMARY KEY, line TEXT NOT NULL);
"""
"""Tokens and log-probs are raw little-endian int32 and float32; a chunk's header is msgpack, its
checksum CRC-32 of header, token ids and log-probs (see payload.py)."""


@dataclass(frozen=True)
class Table:
    """Where the rows of one type live. ``renamed``: columns that cannot have their field's name in SQL."""

    name: str
    row_type: type[Row]
    renamed: dict[str, str]
    json_fields: frozenset[str]

    @property
    def fields(self) -> tuple[str, ...]:
        # Not ``msgspec.structs.fields``, which evaluates annotations: 0.2 ms for each row that is written.
        return self.row_type.__struct_fields__

    @property
    def columns(self) -> list[str]:
        return [self.renamed.get(name, name) for name in self.fields]

    @property
    def insert(self) -> str:
        marks = ", ".join("?" for _ in self.columns)
        return f"INSERT OR REPLACE INTO {self.name} ({', '.join(self.columns)}) VALUES ({marks})"

    def values(self, row: Row) -> tuple[Any, ...]:
        values: tuple[Any, ...] = msgspec.structs.astuple(row)
        if not self.json_fields:
            return values
        return tuple(
            json.dumps(msgspec.to_builtins(value)) if name in self.json_fields else value
            for name, value in zip(self.fields, values, strict=True)
        )

    def row(self, values: tuple[Any, ...]) -> Row:
        plain = {
            name: json.loads(value) if name in self.json_fields else value
            for name, value in zip(self.fields, values, strict=True)
        }
        return msgspec.convert(plain, self.row_type)


def _table(name: str, row_type: type[Row], *, json_fields: tuple[str, ...] = (), **renamed: str) -> Table:
    return Table(name, row_type, renamed, frozenset(json_fields))


TABLES: Final[dict[type[Row], Table]] = {
    table.row_type: table
    for table in (
        _table("groups", GroupRow),
        _table("trajectories", TrajectoryRow, json_fields=("turn_rewards",)),
        _table("batches", BatchRow, json_fields=("group_ids", "stats"), index="batch"),
        _table("versions", VersionRow),
        _table("trained", TrainedRow, index="batch"),
        _table("failures", FailureRow, index="batch"),
        _table("set_aside", SetAsideRow, index="batch"),
        _table("evaluations", EvaluationRow),
        _table("archives", ArchiveRow),
        _table("archived", ArchivedRow),
    )
}
RUN_KEY: Final = "run"
"""Key of the RunRow, as JSON, in the table meta."""
CHECKPOINTED_TABLE: Final = Table("checkpointed", CheckpointedRow, {}, frozenset())
