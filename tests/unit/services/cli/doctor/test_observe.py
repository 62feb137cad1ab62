"""What the doctor reads from a ledger, whole or damaged."""

import sqlite3
from pathlib import Path

import pytest

from services.broker.store.reader import LEDGER_FILE, StoreCorrupt
from services.cli.doctor.observe import read_ledger
from tests.support.processes.small_run import write_small_run


def test_a_ledger_says_how_far_its_run_has_come(tmp_path: Path) -> None:
    write_small_run(tmp_path / "run")
    state = read_ledger(tmp_path / "run")
    assert (state.batches, state.trained, state.version) == (3, 3, 6)
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
