"""A copy of the ledger that follows the log: what is missing comes from there, what contradicts it is refused."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gspo_services.broker.rows import TaskRow
from gspo_services.broker.standby.database import DatabaseLog, LoggedRun
from gspo_services.broker.standby.ledger_copy import LedgerCopy
from gspo_services.broker.store import LEDGER_FILE, LedgerDiverged, RowChanges, Store, StoreDamaged
from tests.support.postgres.fixtures import SynchronousDatabase
from tests.support.postgres.logs import opened_log

RUN = LoggedRun(run_id="run", fingerprint="f", ledger_schema=1, format=1)


@pytest.fixture
def log(postgres: SynchronousDatabase, schema: str) -> Iterator[DatabaseLog]:
    made = opened_log(postgres, schema)
    yield made
    made.database.close()


@contextmanager
def a_copy(directory: Path, log: DatabaseLog, run: LoggedRun = RUN) -> Iterator[LedgerCopy]:
    directory.mkdir(exist_ok=True)
    copy = LedgerCopy(directory, run, log)
    try:
        yield copy
    finally:
        copy.close()


def commit(directory: Path, log: DatabaseLog, numbers: range) -> None:
    directory.mkdir(exist_ok=True)
    with Store(directory / LEDGER_FILE, fingerprint="f", run_id="run", log=log) as store:
        for number in numbers:
            store.commit(RowChanges(rows=[TaskRow(task_index=number)], lines=[{"event": "batch", "batch": number}]))


def test_an_empty_directory_gets_the_whole_ledger_and_no_more_than_was_asked_for(tmp_path: Path, log: DatabaseLog) -> None:
    commit(tmp_path / "leader", log, range(5))
    with a_copy(tmp_path / "standby", log) as copy:
        assert copy.follow(3) == 3
        assert copy.follow(3) == 0
        assert [row.task_index for row in copy.store.contents().tasks] == [0, 1, 2]
        assert copy.follow(99) == 2
        copy.require_whole()
        assert [row.task_index for row in copy.store.contents().tasks] == [0, 1, 2, 3, 4]


def test_a_ledger_that_lost_its_end_with_its_disk_gets_it_back(tmp_path: Path, log: DatabaseLog) -> None:
    directory = tmp_path / "leader"
    commit(directory, log, range(2))
    shutil.copytree(directory, tmp_path / "older")
    commit(directory, log, range(2, 4))
    shutil.copy(tmp_path / "older" / LEDGER_FILE, directory / LEDGER_FILE)
    with a_copy(directory, log) as copy:
        assert copy.store.newest.number == 2
        assert copy.follow(99) == 2
        copy.require_whole()


def test_a_ledger_that_is_ahead_of_the_log_is_refused(tmp_path: Path, log: DatabaseLog) -> None:
    commit(tmp_path / "leader", log, range(3))
    log.database.run(f"DELETE FROM {log.database.schema}.commits WHERE number = 3")
    with pytest.raises(LedgerDiverged, match="is at commit 3, and the log ends at commit 2: the log was"):
        with a_copy(tmp_path / "leader", log):
            pass
    log.database.run(f"DELETE FROM {log.database.schema}.commits")
    with pytest.raises(LedgerDiverged, match="is at commit 3, and the log is empty: "):
        with a_copy(tmp_path / "leader", log):
            pass


def test_a_ledger_that_contradicts_the_log_is_refused_and_the_text_says_what_to_move(
    tmp_path: Path, log: DatabaseLog
) -> None:
    commit(tmp_path / "leader", log, range(3))
    log.database.run(f"UPDATE {log.database.schema}.commits SET digest = 'other' WHERE number = 3")
    with pytest.raises(LedgerDiverged, match=r"commit 3 has digest .*, and the log has one with digest other: .* Move"):
        with a_copy(tmp_path / "leader", log):
            pass
    another = LoggedRun(run_id="another", fingerprint="f", ledger_schema=1, format=1)
    with pytest.raises(LedgerDiverged, match="is of run run, the log of run another: move ledger"):
        with a_copy(tmp_path / "leader", log, another):
            pass


def test_a_log_that_lost_what_the_files_beside_the_ledger_know_of_is_noticed(tmp_path: Path, log: DatabaseLog) -> None:
    directory = tmp_path / "leader"
    commit(directory, log, range(3))
    for each in directory.glob("ledger.sqlite3*"):
        each.unlink()
    log.database.run(f"DELETE FROM {log.database.schema}.commits WHERE number = 3")
    with a_copy(directory, log) as copy:
        assert copy.follow(99) == 2
        with pytest.raises(StoreDamaged, match=r"ends at commit 2, ledger.mark at commit 3: .* The database"):
            copy.require_whole()


def test_a_commit_that_was_changed_in_the_database_is_not_written(tmp_path: Path, log: DatabaseLog) -> None:
    commit(tmp_path / "leader", log, range(2))
    log.database.run(f"UPDATE {log.database.schema}.commits SET content = '\\x00' WHERE number = 2")
    with a_copy(tmp_path / "standby", log) as copy:
        with pytest.raises(LedgerDiverged, match="commit 2 of the log cannot be read: "):
            copy.follow(99)
        assert copy.store.newest.number == 1
