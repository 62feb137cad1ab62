"""One snapshot of a run's ledger, read as typed rows; everything that can be long is paged."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from gspo_services.broker.rows import (
    BatchRow,
    EvaluationRow,
    GroupRow,
    QuarantinedRow,
    RunRow,
    TrainedRow,
    TrajectoryRow,
    VersionRow,
)
from gspo_services.broker.store import LEDGER_FILE, Reader, StoreCorrupt, lock_holder, reading, refusing_damage
from gspo_services.runs.reading.lines import MetricsLines
from gspo_services.runs.reading.rows import RecordedBatch, RecordedGroup, RecordedTokens, RecordedTrajectory, RunFacts
from gspo_services.runs.reading.token_arrays import tokens_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, read_run_settings

PAGE: Final = 512
"""Rows that are read at a time while everything is iterated over."""
RUN_KEY: Final = "run"


@contextmanager
def open_run(directory: Path) -> Iterator["OpenRun"]:
    """Read ``directory`` as it stands now: one state of the ledger, whatever a running broker writes meanwhile.

    Keep it open for as long as one look takes: a broker cannot shorten its write-ahead log meanwhile. For a live run, open
    it again. Not thread-safe. Raises: NoLedger when there is no ledger of this release; later, each method raises
    StoreCorrupt where what it reads is damaged (both of ``gspo_services.broker.store``, both with the way out).
    """
    with reading(directory) as connection:
        yield OpenRun(directory, connection)


class OpenRun:
    """A run as it stood when it was opened. Ids are those of the ledger, from 0."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self.connection = connection
        self._path = directory / LEDGER_FILE
        self._reader = Reader(self._path, connection)
        self._batch_versions: dict[int, int] | None = None
        self._evaluations: dict[int, EvaluationRow] | None = None

    # --- the run as a whole -------------------------------------------------------------------------------------------

    def facts(self) -> RunFacts:
        """What is known about the run as a whole. It costs some milliseconds, whatever the run's size."""
        settings, error = self._settings()
        meta = self._reader.meta()
        try:
            run = msgspec.json.decode(meta[RUN_KEY], type=RunRow) if RUN_KEY in meta else RunRow()
        except msgspec.MsgspecError as damage:
            raise StoreCorrupt(f"{self._path}: what is known of the run cannot be read: {damage}") from damage
        return RunFacts(
            directory=self.directory,
            run_id=meta.get("run_id", ""),
            settings=settings,
            settings_error=error,
            is_live=lock_holder(self._path) is not None,
            num_batches=self._number("SELECT max(batch) + 1 FROM batches"),
            num_trained=self._number("SELECT count(DISTINCT batch) FROM trained"),
            policy_version=self._number("SELECT max(policy_version) FROM versions"),
            num_groups=self._number("SELECT max(group_id) + 1 FROM groups"),
            num_trajectories=self._number("SELECT max(trajectory_id) + 1 FROM trajectories"),
            stop_reason=run.stop_reason,
            error=run.error,
        )

    def _settings(self) -> tuple[Settings | None, str]:
        try:
            return read_run_settings(self.directory), ""
        except (ConfigurationError, AttributeError, TypeError) as error:
            return None, str(error)

    def versions(self) -> list[VersionRow]:
        """All publications, by version."""
        return self._reader.rows(VersionRow, "ORDER BY policy_version")

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, by id, also one that is open."""
        return list(self._known_evaluations().values())

    def evaluation(self, evaluation_id: int) -> EvaluationRow | None:
        """One evaluation; None when it is not there."""
        return self._known_evaluations().get(evaluation_id)

    def lines(self) -> MetricsLines:
        """The lines of metrics.jsonl, from the ledger: one for each batch, evaluation, drop, quarantine or requeue."""
        return MetricsLines(self._reader)

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(self, first: int = 0, end: int | None = None) -> Iterator[RecordedBatch]:
        """The assembled batches from ``first`` up to and without ``end``, by index."""
        rest = "WHERE batch >= ? AND batch < ? ORDER BY batch LIMIT ?"
        for row in self._paged(BatchRow, rest, first, end, lambda row: row.index):
            yield self._recorded_batch(row)

    def batch(self, index: int) -> RecordedBatch | None:
        """One batch; None when it was not assembled (yet)."""
        rows = self._reader.rows(BatchRow, "WHERE batch = ?", (index,))
        return self._recorded_batch(rows[0]) if rows else None

    def _recorded_batch(self, row: BatchRow) -> RecordedBatch:
        trained = self._reader.rows(TrainedRow, "WHERE batch = ? ORDER BY policy_version", (row.index,))
        quarantined = self._reader.rows(QuarantinedRow, "WHERE batch = ?", (row.index,))
        return RecordedBatch(
            index=row.index,
            policy_version=row.policy_version,
            group_ids=row.group_ids,
            stats=row.stats,
            trained_versions=tuple(each.policy_version for each in trained if each.how == "trained"),
            quarantined=quarantined[0].reason if quarantined else "",
        )

    # --- groups and trajectories --------------------------------------------------------------------------------------

    def groups_of_batch(self, index: int) -> list[RecordedGroup]:
        """A batch's groups, in the order in which the learner gets them; none of a batch that is not there."""
        batch = self.batch(index)
        found = [] if batch is None else [self.group(group_id) for group_id in batch.group_ids]
        return [group for group in found if group is not None]

    def groups(
        self,
        *,
        first: int = 0,
        end: int | None = None,
        status: str | None = None,
        split: str | None = None,
        drop_reason: str | None = None,
        evaluation: int | None = None,
        task_index: int | None = None,
    ) -> Iterator[RecordedGroup]:
        """Groups with ids from ``first`` up to and without ``end``, by id; of those, the ones with these values."""
        chosen = {
            "status": status, "split": split, "drop_reason": drop_reason, "evaluation": evaluation, "task_index": task_index,
        }  # fmt: skip
        given = {name: value for name, value in chosen.items() if value is not None}
        conditions = "".join(f" AND {name} = ?" for name in given)
        rest = f"WHERE group_id >= ? AND group_id < ?{conditions} ORDER BY group_id LIMIT ?"
        for row in self._paged(GroupRow, rest, first, end, lambda row: row.group_id, *given.values()):
            yield self._recorded_group(row)

    def group(self, group_id: int) -> RecordedGroup | None:
        """One group with its trajectories; None when it is not there."""
        rows = self._reader.rows(GroupRow, "WHERE group_id = ?", (group_id,))
        return self._recorded_group(rows[0]) if rows else None

    def trajectories(self, first: int = 0, end: int | None = None) -> Iterator[RecordedTrajectory]:
        """Trajectories with ids from ``first`` up to and without ``end``, by id, whatever became of them."""
        versions: dict[int, int | None] = {}
        rest = "WHERE trajectory_id >= ? AND trajectory_id < ? ORDER BY trajectory_id LIMIT ?"
        for row in self._paged(TrajectoryRow, rest, first, end, lambda row: row.trajectory_id):
            if row.group_id not in versions:
                group = self._reader.rows(GroupRow, "WHERE group_id = ?", (row.group_id,))
                # A group's trajectories follow each other: only the last ones are asked for again.
                versions = {row.group_id: self._batch_version(group[0].batch) if group else None}
            yield _trajectory(row, versions[row.group_id])

    def trajectory(self, trajectory_id: int) -> RecordedTrajectory | None:
        """One trajectory; None when it is not there."""
        return next(self.trajectories(trajectory_id, trajectory_id + 1), None)

    def tokens(self, trajectory_id: int) -> RecordedTokens:
        """A trajectory's acknowledged tokens, from the ledger or the archive; none of one that is not there.

        Raises: StoreCorrupt when they are not what was acknowledged, or an archive file is missing.
        """
        rows = self._reader.rows(TrajectoryRow, "WHERE trajectory_id = ?", (trajectory_id,))
        stored = self._reader.chunks(trajectory_id)
        try:
            return tokens_of(trajectory_id, stored, rows[0].discarded_turns if rows else ())
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreCorrupt(f"{self._path}: {error}") from error

    def journal(self, trajectory_id: int) -> list[bytes]:
        """The entries of a trajectory's journal as msgpack; none after its group was archived. Raises: StoreCorrupt."""
        return self._reader.journal(trajectory_id)

    # --- below --------------------------------------------------------------------------------------------------------

    def _recorded_group(self, row: GroupRow) -> RecordedGroup:
        version = self._batch_version(row.batch)
        if row.evaluation is not None:
            evaluation = self._known_evaluations().get(row.evaluation)
            version = None if evaluation is None else evaluation.policy_version
        members = self._reader.rows(TrajectoryRow, "WHERE group_id = ? ORDER BY trajectory_id", (row.group_id,))
        return RecordedGroup(
            group_id=row.group_id,
            split=row.split,
            task_index=row.task_index,
            prompt=row.prompt,
            status=row.status,
            batch=row.batch,
            policy_version=version,
            evaluation=row.evaluation,
            drop_reason=row.drop_reason,
            replaces=row.replaces,
            members=tuple(_trajectory(member, None if row.batch is None else version) for member in members),
        )

    def _batch_version(self, index: int | None) -> int | None:
        if self._batch_versions is None:
            with refusing_damage(self._path):
                found = self.connection.execute("SELECT batch, policy_version FROM batches")
                self._batch_versions = dict(found.fetchall())
        return None if index is None else self._batch_versions.get(index)

    def _known_evaluations(self) -> dict[int, EvaluationRow]:
        if self._evaluations is None:
            rows = self._reader.rows(EvaluationRow, "ORDER BY evaluation_id")
            self._evaluations = {row.evaluation_id: row for row in rows}
        return self._evaluations

    def _paged(
        self, row_type: type[Any], rest: str, first: int, end: int | None, key: Callable[[Any], int], *values: Any
    ) -> Iterator[Any]:
        """Rows of one table by key, some at a time. ``rest`` takes the first key, the end, ``values``, and how many."""
        most = 2**62 if end is None else end
        while rows := self._reader.rows(row_type, rest, (first, most, *values, PAGE)):
            yield from rows
            if len(rows) < PAGE:
                return
            first = key(rows[-1]) + 1

    def _number(self, query: str) -> int:
        return self._reader.number(query)

    def select(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a query of one's own, for what no method gives. No checksum is compared. Raises: StoreCorrupt."""
        with refusing_damage(self._path):
            return self.connection.execute(query, parameters).fetchall()


def _trajectory(row: TrajectoryRow, batch_version: int | None) -> RecordedTrajectory:
    mean = row.version_sum / row.num_action_tokens if row.num_action_tokens else None
    return RecordedTrajectory(
        trajectory_id=row.trajectory_id,
        group_id=row.group_id,
        status=row.status,
        finish_reason=row.finish_reason,
        reward=row.reward if row.status == "finished" else None,
        turn_rewards=row.turn_rewards,
        components=row.components,
        discarded_turns=row.discarded_turns,
        turn_roles=row.turn_roles,
        num_tokens=row.num_tokens,
        num_action_tokens=row.num_action_tokens,
        num_turns=row.num_turns,
        min_version=row.min_version,
        mean_version=mean,
        lag=None if mean is None or batch_version is None else batch_version - mean,
        epoch=row.epoch,
        attempts=row.attempts,
        holder=row.holder_peer,
    )
