"""What the doctor sees of damage to a ledger, and of the process that holds the ledger."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from gspo_services.broker.store import LEDGER_FILE, NoLedger, Reader, lock_holder, reading, require_whole
from gspo_services.shared.runtime.errors import DiskDamageError

SUSPENDED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that has the ledger open for writing. ``pid`` is 0 when it cannot be determined."""

    pid: int
    suspended: bool


def find_damage(directory: Path) -> str:
    """Describe what a broker would refuse to start with; empty if nothing. Reads what a start reads, not every row.

    Raises: OSError when the files beside the ledger cannot be read now.
    """
    try:
        require_whole(directory / LEDGER_FILE)
        with reading(directory) as connection:
            Reader(directory / LEDGER_FILE, connection).contents()
    except DiskDamageError as error:
        return str(error)
    except (NoLedger, sqlite3.OperationalError):
        return ""  # The reader of the ledger says why it cannot be read.
    return ""


def find_holder(directory: Path) -> Holder | None:
    """Find who holds the ledger; None if nobody does."""
    pid = lock_holder(directory / LEDGER_FILE)
    if pid is None:
        return None
    try:
        suspended = bool(pid) and psutil.Process(pid).status() in SUSPENDED
    except psutil.Error:
        suspended = False
    return Holder(pid=pid, suspended=suspended)
