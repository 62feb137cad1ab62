"""What the doctor says of a ledger that is damaged, or held by a process that does not run."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.cli.doctor.damage import Holder, find_damage, find_holder
from tests.support.broker.damage import DAMAGE, FLIPS, killed_run, run

__all__ = ["killed_run", "run"]  # fixtures

HOLD = """
import sys, time
from pathlib import Path
from gspo_services.broker.store.lock import LedgerLock
LedgerLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("damage", "words"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_the_doctor_says_what_is_lost(run: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(run)
    assert re.search(words, find_damage(run))


def test_a_whole_ledger_has_no_damage(run: Path, tmp_path: Path) -> None:
    assert find_damage(run) == ""
    assert find_damage(tmp_path) == ""


@pytest.mark.parametrize("statement", [FLIPS[0][1], FLIPS[1][1], FLIPS[2][1], FLIPS[4][1], FLIPS[8][1], FLIPS[9][1]])
def test_a_changed_row_that_a_start_needs_is_named(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / LEDGER_FILE)
    connection.execute(statement)
    connection.commit()
    connection.close()
    assert "changed on the disk" in find_damage(run)


def test_the_holder_of_the_lock_is_named_and_whether_it_is_suspended(run: Path) -> None:
    assert find_holder(run) is None
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / LEDGER_FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "held\n"
        assert find_holder(run) == Holder(pid=child.pid, suspended=False)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert find_holder(run) == Holder(pid=child.pid, suspended=True)
        child.send_signal(signal.SIGCONT)
        child.stdin.close()
    assert find_holder(run) is None
