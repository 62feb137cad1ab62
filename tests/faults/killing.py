"""Random moments of runs with agents, and who dies at them."""

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil

from gspo_services.broker.store.reader import LEDGER_FILE
from tests.faults.fleet import Fleet


def wait_for_episodes(fleet: Fleet, number: int) -> None:
    """Wait until so many more have ended: a random moment."""
    before = count(fleet.directory, "status = 'finished'")
    fleet.wait_until(
        f"{number} more episodes",
        lambda: count(fleet.directory, "status = 'finished'") >= before + number,
    )


def kill(fleet: Fleet, victim: str, rollout: str) -> int:
    """Returns how many were killed: none when the victim has just died or not begun."""
    member = fleet.members["broker" if victim == "broker" else rollout]
    if not member.look():
        return 0
    if victim in ("broker", "rollout"):
        if victim == "rollout":
            member.kill_tree()
        else:
            member.signal(signal.SIGKILL)
        return 1
    word = "tasks/worker/main.py" if victim == "worker" else "scheduler"
    for process in psutil.Process(member.pid).children(recursive=True):
        try:
            if word in process.name() or any(word in each for each in process.cmdline()):
                process.kill()
                return 1
        except psutil.NoSuchProcess:
            continue
    return 0


def count(directory: Path, where: str, what: str = "count(*)") -> int:
    with closing(sqlite3.connect(f"file:{directory / LEDGER_FILE}?mode=ro", uri=True)) as connection:
        (value,) = connection.execute(f"SELECT {what} FROM trajectories WHERE {where}").fetchone()
    return int(value or 0)
