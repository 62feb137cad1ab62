"""The right to a device's memory: an exclusive lock of the operating system on a file in the run's directory.

The kernel gives the lock back when the last process that has it open has ended, however it ended. So a killed holder never
keeps the device. SGLang's server gets the open file, too: a killed rollout has the device until its server has gone.

**No deadlock.** Each side waits for the other only while it does not hold the lock.

- The rollout holds it to load a version that it has fetched already, and while it has leases or may get some. Its window is
  finite: broker.ledger.admission gives at most (max_lag + 1) x groups_per_batch groups to one version, dynamic sampling and
  evaluations add a bounded number, and only the learner makes the next version. So whatever max_lag is, the window is spent
  some time, and the rollout gives the lock back. It never fetches, nor waits for a version, with the lock in hand: when its
  weights are in doubt, it gives the device up before it asks for others.
- The learner takes it when a batch has come whole. With it, it waits for the broker alone, which needs no device. It
  serves versions from the host's memory, in a thread of its own, with or without the lock.

Neither side is starved: without new versions the rollout's window is spent, and without new groups the learner has no batch.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from gspo_services.shared.runtime.errors import ConfigurationError

LOCK_FILE: Final = "device.lock"
"""In the run's directory. It has the name of whoever took the lock last; empty after it was given back."""
DEVICE_POLL_S: Final = 0.1
"""Time between two looks at a lock that somebody else holds."""
_MOST_NAME: Final = 100


class DeviceLock:
    """One process's end of the lock. Not for several threads."""

    def __init__(self, path: Path, name: str) -> None:
        """``name``: who is asking, for others to read. Raises: ConfigurationError when the file cannot be opened."""
        self._path = path
        self._name = name
        self.held = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unusable(error) from error

    def try_take(self) -> bool:
        """Take the lock unless another process holds it. Returns whether this process holds it now.

        Raises: ConfigurationError on a file system without locks.
        """
        if self.held:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
                return False
            raise self._unusable(error) from error
        self.held = True
        self._write(self._name)
        return True

    def give_back(self) -> None:
        """Let others take it, also where a child has the open file. Without the lock this does nothing."""
        if self.held:
            self._write("")
            self.held = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def holder(self) -> str:
        """Who took it last and has not given it back; empty: nobody. A killed holder's name stays until the next one."""
        return os.pread(self._file, _MOST_NAME, 0).decode(errors="replace")

    def fileno(self) -> int:
        """The open file, for a child that shall keep the lock until it ends."""
        return self._file

    def close(self) -> None:
        """Give the lock back and close the file."""
        self.give_back()
        os.close(self._file)

    def _write(self, name: str) -> None:
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, name.encode()[:_MOST_NAME], 0)
        except OSError:  # A full disk: the name is only for people.
            return

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{self._path} cannot be locked: {error.strerror}; run.colocate needs a file system with locks: use a "
            "run.directory on a local disk, or run.colocate = false"
        )


def device_holder(path: Path) -> str:
    """``DeviceLock.holder``, for somebody who never takes it; empty, too, while there is no such file."""
    try:
        return path.read_bytes()[:_MOST_NAME].decode(errors="replace")
    except OSError:
        return ""
