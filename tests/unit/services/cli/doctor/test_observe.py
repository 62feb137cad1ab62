"""What the doctor reads from a ledger, whole or damaged."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gspo_services.broker.store.reader import LEDGER_FILE, StoreCorrupt
from gspo_services.cli.doctor.observe import observe, read_ledger
from gspo_services.shared.settings.sections import Broker, Run, Settings
from tests.support.processes.small_run import write_small_run


def test_a_ledger_says_how_far_its_run_has_come(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    state = read_ledger(tmp_path / "run")
    assert (state.batches, state.trained, state.version) == (3, 3, 5)
    assert state.groups["batched"] == 6


@pytest.mark.parametrize("table", ["versions", "groups"])
def test_a_damaged_ledger_is_named_with_what_to_do(table: str, tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    path = tmp_path / "run" / LEDGER_FILE
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    path.write_bytes(data)
    with pytest.raises(StoreCorrupt, match=f"{path} is damaged: .*gspo audit {path.parent}"):
        read_ledger(path.parent)


async def test_files_that_cannot_be_read_are_named_and_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs" / "broker.log").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").mkdir()
    settings = Settings(run=Run(directory=tmp_path), broker=Broker(batch_endpoint="tcp://127.0.0.1:9"))
    seen = await observe(settings, datetime.now(tz=UTC), answer_s=0.01)
    assert seen.unread == [f"{tmp_path / 'logs' / 'broker.log'} (Is a directory)"]
    assert "no ledger" in seen.no_ledger
