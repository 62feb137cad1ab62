"""What was quarantined is listed and requeued, in the ledger of a run without a broker."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gspo_services.broker.rows import GroupRow, QuarantinedRow
from gspo_services.broker.store import LEDGER_FILE, Reader
from gspo_services.broker.store.rewind import write_rows
from gspo_services.broker.store.schema import row_checksum
from gspo_services.cli.requeue import read_quarantine, requeue_command
from gspo_services.shared.settings import override_settings, read_run_settings, run_fingerprint
from gspo_services.shared.settings.run_settings import write_run_settings
from tests.support.processes.small_run import write_small_run

BATCH = 2


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose broker does not run, and has quarantined a batch."""
    directory = tmp_path / "run"
    write_small_run(directory)
    settings = override_settings(
        read_run_settings(directory), ["broker.work_endpoint=tcp://127.0.0.1:1", "broker.batch_endpoint=tcp://127.0.0.1:2"]
    )
    write_run_settings(settings)
    with closing(sqlite3.connect(directory / LEDGER_FILE)) as connection:
        reader = Reader(directory / LEDGER_FILE, connection)
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


def test_the_groups_of_a_batch_are_listed_and_requeued(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = read_quarantine(run)
    assert (found.batch, found.waiting, found.requeued, found.reason) == (BATCH, 2, 0, "NaN")
    assert requeue_command(run, ["all"], only_list=False) == 0
    assert "batch 2 is requeued" in capsys.readouterr().out
    assert [(each.waiting, each.requeued) for each in read_quarantine(run)] == [(0, 2)]
