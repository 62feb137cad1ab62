"""Turns a restored ledger into a separate run's, and undoes everything after a batch."""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gspo_services.broker.rows import (
    ArchivedRow,
    ArchiveRow,
    BatchRow,
    CheckpointedRow,
    GroupRow,
    LevelRow,
    Row,
    RunRow,
    TrajectoryRow,
)
from gspo_services.broker.store.commits import first_commit, write_commit
from gspo_services.broker.store.inspection import mark_ledger
from gspo_services.broker.store.reader import Reader, StoreMismatch
from gspo_services.broker.store.schema import LOG_KEY, RUN_KEY, TABLES, row_checksum

_OF_GROUPS: Final = "trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE group_id IN (SELECT * FROM gone))"
REMOVE_GROUPS: Final = (
    f"DELETE FROM chunks WHERE {_OF_GROUPS}",
    f"DELETE FROM journal WHERE {_OF_GROUPS}",
    "DELETE FROM archived WHERE group_id IN (SELECT * FROM gone)",
)
LINES: Final = "SELECT number, line FROM metrics_lines ORDER BY number"


def rewrite_ledger(ledger: Path, *, run_id: str, rewind_to: tuple[int, int] | None = None) -> None:
    """Give the ledger of a restored run its own ``run_id``; no learner owns the run in it.

    ``rewind_to``: a number of batches and the policy version of the checkpoint that covers them (0: it has none, because its
    learner trained batches again; the one that had made as many batches first is meant). Batches from there on,
    versions after it and what depends on them are removed. The prompts of their groups, and of groups that were under way,
    are sampled again: each prompt up to the last one that stays keeps its group, without tokens.

    Raises: StoreMismatch when quarantined batches were requeued, which cannot be undone; StoreCorrupt.
    """
    with closing(sqlite3.connect(ledger, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        reader = Reader(ledger, connection)
        connection.execute("BEGIN IMMEDIATE")
        run = reader.contents().run
        if rewind_to is None:
            run = replace(run, learner_peer="", learner_session="")
        else:
            run = _Rewind(reader, connection, *rewind_to).carry_out()
        write_identity(connection, run, run_id)
        _begin_again(reader, connection, run_id)
        connection.execute("COMMIT")
        connection.execute("VACUUM")
    mark_ledger(ledger)


def count_requeued(reader: Reader) -> int:
    """Groups that were quarantined and requeued, which cannot be undone. Raises: StoreCorrupt."""
    return reader.number("SELECT count(*) FROM groups WHERE status IN ('requeued', 'resampled')")


def write_identity(connection: sqlite3.Connection, run: RunRow, run_id: str) -> None:
    """Write what is known of the run as a whole."""
    for row in ((RUN_KEY, msgspec.json.encode(run).decode()), ("run_id", run_id)):
        values = (*row, row_checksum("meta", row))
        connection.execute("INSERT OR REPLACE INTO meta (key, value, checksum) VALUES (?, ?, ?)", values)


def _begin_again(reader: Reader, connection: sqlite3.Connection, run_id: str) -> None:
    """Begin a separate chain of commits, after the number of the last one."""
    commit = msgspec.structs.replace(
        first_commit(run_id),
        number=reader.newest_commit().number + 1,
        chunks=reader.number("SELECT count(*) FROM chunks"),
        tokens=reader.number("SELECT sum(num_tokens) FROM chunks"),
        batches=reader.number("SELECT count(*) FROM batches"),
        lines=reader.number("SELECT max(number) FROM metrics_lines"),
    )
    connection.execute("DELETE FROM commits")
    connection.execute("DELETE FROM meta WHERE key = ?", (LOG_KEY,))
    write_commit(connection, commit)


def write_rows(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write rows as a broker does."""
    for row in rows:
        table = TABLES[type(row)]
        connection.execute(table.insert, table.values(row))


class _Rewind:
    def __init__(self, reader: Reader, connection: sqlite3.Connection, next_batch: int, policy_version: int) -> None:
        self._reader = reader
        self._connection = connection
        self._next_batch = next_batch
        self._policy_version = policy_version

    def carry_out(self) -> RunRow:
        """In the caller's transaction. Returns what is known of the run then. Raises: StoreMismatch, StoreCorrupt."""
        reader, next_batch = self._reader, self._next_batch
        if not self._policy_version:
            newest = f"SELECT max(policy_version) FROM versions WHERE trained_batches <= {next_batch:d}"
            self._policy_version = reader.number(newest)
        version = self._policy_version
        self._require_simple()
        last_line = self._last_line()
        kept = {group_id for row in reader.rows(BatchRow, "WHERE batch < ?", (next_batch,)) for group_id in row.group_ids}
        evaluations = self._kept_evaluations(last_line)
        over = self._over(last_line)
        groups = reader.rows(GroupRow, "ORDER BY group_id")
        last_prompt = max((row.prompt for row in groups if row.group_id in kept), default=-1)
        again, gone = [], []
        for row in groups:
            if row.group_id in kept or (row.split == "eval" and row.evaluation in evaluations):
                continue
            if row.split == "train" and row.prompt <= last_prompt:
                if row.group_id not in over:
                    again.append(row)
            else:
                gone.append(row.group_id)
        self._forget_tokens([*gone, *(row.group_id for row in again)])
        self._start_again(again)
        self._delete("groups", "group_id", gone)
        self._delete("trajectories", "group_id", gone)
        for table, condition, value in (
            ("batches", "batch >= ?", next_batch),
            ("failures", "batch >= ?", next_batch),
            ("quarantined", "batch >= ?", next_batch),
            ("trained", "batch >= ?", next_batch),
            ("trained", "policy_version > ?", version),
            # Batches that were trained again: their lines may come later.
            ("trained", "policy_version = ?", 0),
            ("versions", "policy_version > ?", version),
            ("metrics_lines", "number > ?", last_line),
            # What rests is found out anew.
            ("tasks", "task_index >= ?", 0),
            ("levels", "ladder >= ?", 0),
        ):
            self._connection.execute(f"DELETE FROM {table} WHERE {condition}", (value,))
        self._connection.execute(
            f"DELETE FROM evaluations WHERE evaluation_id NOT IN (SELECT value FROM json_each('{sorted(evaluations)}'))"
        )
        self._shorten_archives()
        # The newest line of a ladder says at which level it was then.
        changes = {line["number"]: line["level"] for line in self._lines_until(last_line, "level")}
        levels = [LevelRow(ladder=number, level=level) for number, level in changes.items()]
        write_rows(self._connection, [CheckpointedRow(next_batch=next_batch), *levels])
        since = [line for line in self._lines_until(last_line, "filtered") if line["batch"] >= next_batch]
        num_tokens = sum(sum(line["num_tokens"]) for line in since)
        return RunRow(filtered_groups=len(since), filtered_tokens=num_tokens)

    def _require_simple(self) -> None:
        num_requeued = count_requeued(self._reader)
        if num_requeued:
            raise StoreMismatch(
                f"{self._reader.path}: {num_requeued} groups were quarantined and requeued, which cannot be undone: "
                "restore the whole backup, without --batch"
            )

    def _last_line(self) -> int:
        """The last line of metrics.jsonl of that time: the training of the last batch that stays."""
        last = 0
        for number, text in self._connection.execute(LINES):
            line = json.loads(text)
            trained = line.get("event") in ("batch", "batch_skipped")
            if trained and line["batch"] < self._next_batch and 0 < line["policy_version"] <= self._policy_version:
                last = number
        return last

    def _kept_evaluations(self, last_line: int) -> set[int]:
        """Evaluations whose result is among the lines that stay."""
        lines = [*self._lines_until(last_line, "eval"), *self._lines_until(last_line, "evaluation")]
        known = {(line["policy_version"], line["batch"], line.get("set", "")) for line in lines}
        query = "SELECT evaluation_id, policy_version, batch, name FROM evaluations WHERE status = 'done'"
        return {number for number, *of_row in self._connection.execute(query) if tuple(of_row) in known}

    def _over(self, last_line: int) -> set[int]:
        """Groups that were dropped or filtered out by then."""
        return {line["group_id"] for event in ("dropped", "filtered") for line in self._lines_until(last_line, event)}

    def _lines_until(self, last_line: int, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(text) for number, text in self._connection.execute(LINES) if number <= last_line)
        return [line for line in lines if line.get("event") == event]

    def _forget_tokens(self, group_ids: Iterable[int]) -> None:
        self._connection.execute("CREATE TEMP TABLE gone (group_id INTEGER PRIMARY KEY)")
        self._connection.executemany("INSERT INTO gone VALUES (?)", [(group_id,) for group_id in group_ids])
        for statement in REMOVE_GROUPS:
            self._connection.execute(statement)

    def _start_again(self, groups: Iterable[GroupRow]) -> None:
        """Make groups as they were admitted. Epochs only grow."""
        rows: list[Row] = []
        for group in groups:
            rows.append(replace(group, status="open", batch=None, drop_reason=None))
            members = self._reader.rows(TrajectoryRow, "WHERE group_id = ?", (group.group_id,))
            rows += [
                TrajectoryRow(trajectory_id=row.trajectory_id, group_id=row.group_id, epoch=row.epoch) for row in members
            ]
        write_rows(self._connection, rows)

    def _delete(self, table: str, column: str, values: Iterable[int]) -> None:
        self._connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(value,) for value in values])

    def _shorten_archives(self) -> None:
        """Files without a group that stays are not the run's any more; of the others only the groups that stay count."""
        named = {row.archive for row in self._reader.rows(ArchivedRow, "")}
        rows: list[Row] = []
        for row in self._reader.rows(ArchiveRow, ""):
            if row.archive not in named:
                self._delete("archives", "archive", [row.archive])
            elif row.last_batch is not None and row.last_batch >= self._next_batch:
                begins_before = row.first_batch is not None and row.first_batch < self._next_batch
                rows.append(
                    replace(
                        row,
                        first_batch=row.first_batch if begins_before else None,
                        last_batch=self._next_batch - 1 if begins_before else None,
                    )
                )
        write_rows(self._connection, rows)
