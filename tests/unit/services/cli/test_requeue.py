"""What several brokers have quarantined is listed as one batch, and requeued in every ledger."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gspo_services.broker.rows import GroupRow, QuarantinedRow
from gspo_services.broker.store import LEDGER_FILE, Reader
from gspo_services.broker.store.rewind import write_rows
from gspo_services.broker.store.schema import row_checksum
from gspo_services.cli.requeue import quarantined_in, read_quarantine, requeue_command
from gspo_services.shared.settings import override_settings, read_run_settings, run_fingerprint
from gspo_services.shared.settings.run_settings import write_run_settings
from tests.support.processes.small_run import write_shared_run

BATCH = 2


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two brokers, none of which runs; both have quarantined their share of a batch."""
    directory = tmp_path / "run"
    write_shared_run(directory, 2)
    for each in ledgers(directory):
        settings = override_settings(
            read_run_settings(each), ["broker.work_endpoint=tcp://127.0.0.1:1", "broker.batch_endpoint=tcp://127.0.0.1:2"]
        )
        write_run_settings(settings)
        with closing(sqlite3.connect(each / LEDGER_FILE)) as connection:
            reader = Reader(each / LEDGER_FILE, connection)
            groups = [replace(row, status="quarantined") for row in reader.rows(GroupRow, "WHERE batch = ?", (BATCH,))]
            write_rows(connection, [QuarantinedRow(index=BATCH, policy_version=4, reason="NaN"), *groups])
            fingerprint = ("fingerprint", run_fingerprint(settings))
            values = (*fingerprint, row_checksum("meta", fingerprint))
            connection.execute("INSERT OR REPLACE INTO meta (key, value, checksum) VALUES (?, ?, ?)", values)
            connection.commit()
    monkeypatch.setattr("gspo_services.cli.requeue.ANSWER_S", 0.1)  # Nobody answers.
    # It would hold for all tests behind this one, some of which read what is logged.
    monkeypatch.setattr("gspo_services.cli.requeue.configure_logging", lambda *_, **__: None)
    return directory


def ledgers(directory: Path) -> list[Path]:
    return [directory, directory / "broker-1"]


def test_the_groups_of_both_are_listed_and_requeued(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = read_quarantine(run)
    assert (found.batch, found.waiting, found.reason) == (BATCH, 4, "NaN")
    assert requeue_command(run, ["all"], only_list=False) == 0
    assert "batch 2 is requeued" in capsys.readouterr().out
    assert [(each.waiting, each.requeued) for own in ledgers(run) for each in quarantined_in(own)] == [(0, 2), (0, 2)]


def test_a_second_try_requeues_what_an_interrupted_one_left(run: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_FILE)) as connection:
        reader = Reader(run / LEDGER_FILE, connection)
        groups = [replace(row, status="requeued") for row in reader.rows(GroupRow, "WHERE batch = ?", (BATCH,))]
        write_rows(connection, groups)
        connection.commit()
    assert [each.waiting for each in read_quarantine(run)] == [2]
    assert requeue_command(run, [str(BATCH)], only_list=False) == 0
    assert [each.waiting for each in read_quarantine(run)] == [0]
