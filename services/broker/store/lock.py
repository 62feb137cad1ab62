"""The lock of a ledger: a file of its own, held as long as one process has the ledger open for writing.

SQLite's own exclusive mode would keep readers out, too.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

LOCK_SUFFIX: Final = "-lock"
LOCK_WAIT_S: Final = 2.0
"""Seconds to wait for a broker that is about to end."""
LOCK_PAUSE_S: Final = 0.1


class LockHeldError(OSError):
    """Another process has the ledger."""


class LedgerLock:
    """The lock of one ledger, with the holder's process id in its file."""

    def __init__(self, ledger: Path) -> None:
        """Raises: LockHeldError when another process keeps it; OSError when the file cannot be opened or locked."""
        self.path = lock_path(ledger)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + LOCK_WAIT_S
        try:
            while not _taken(self._descriptor):
                if time.monotonic() >= deadline:
                    raise LockHeldError(f"{self.path} is held")
                time.sleep(LOCK_PAUSE_S)
        except OSError:
            os.close(self._descriptor)
            raise
        # The lock holds without the number, for which a full disk has no room.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def lock_path(ledger: Path) -> Path:
    """Where the lock of ``ledger`` is."""
    return ledger.with_name(ledger.name + LOCK_SUFFIX)


def lock_holder(ledger: Path) -> int | None:
    """The process that has ``ledger`` open for writing, 0 when it cannot be told; None when none has.

    The number is that of the holder's own process namespace.
    """
    try:
        descriptor = os.open(lock_path(ledger), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, InterruptedError):
        return False
    return True
