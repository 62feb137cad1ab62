"""Limits that hold over all processes of this machine that name the same files. A killed process frees what it has."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.25


class Pace:
    """Requests at even distances: at most ``per_minute`` of them in a minute, with no burst.

    The file holds the time of the next request, on the clock that all processes share since the machine started.
    """

    def __init__(self, path: Path, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._distance_s = 60.0 / per_minute
        self._clock = clock
        self._boot = _BOOT.read_text().strip() if _BOOT.exists() else "-"

    async def wait(self) -> None:
        """Wait for a place in the row; a caller that gives up leaves it empty. Raises: OSError."""
        await anyio.sleep(await anyio.to_thread.run_sync(self.reserve))

    def reserve(self) -> float:
        """Take the next place in the row. Returns the seconds until it. Raises: OSError."""
        with _locked(self._path) as file:
            now = self._clock()
            begin = max(now, self._next_begin(file))
            self._write(file, begin + self._distance_s)
        return begin - now

    def postpone(self, seconds: float) -> None:
        """Let no request that has no place yet begin within ``seconds``. Raises: OSError."""
        with _locked(self._path) as file:
            # In this order: what compares with nothing, NaN, changes nothing.
            self._write(file, max(self._next_begin(file), self._clock() + seconds))

    def _next_begin(self, file: int) -> float:
        try:
            boot, begin = os.pread(file, 256, 0).decode().split()[:2]
            return float(begin) if boot == self._boot else 0.0
        except ValueError:
            return 0.0  # new, or damaged by a full disk

    def _write(self, file: int, begin: float) -> None:
        os.pwrite(file, f"{self._boot} {begin:.6f}\n".encode().ljust(64), 0)


class RequestPlaces:
    """At most ``number`` holders at a time. Each holds the lock of a file, which the kernel frees when its process ends."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a place.

        waits for:    a free place, by asking for one now and then: a lock of a file wakes nobody up
        unblocked by: the end of another holder, or of its process
        Raises: OSError.
        """
        pause_s = _FIRST_PAUSE_S
        while (place := self.take()) is None:
            await anyio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            yield
        finally:
            os.close(place)

    def take(self) -> int | None:
        """The open file of a place that was free, to be closed in the end; None when there is none. Raises: OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        first = random.randrange(self._number)
        for number in range(self._number):
            file = _opened(self._folder / str((first + number) % self._number))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            return file
        return None


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _opened(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
