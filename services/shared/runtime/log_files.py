"""Log files of bounded size: the process that writes one also rotates it, and readers of its end read across a rotation.

The log is whatever descriptors 1 and 2 write: lines of this process, a traceback, the last words of a C library. So rotation
replaces the descriptors themselves, in one system call, and nothing lies between a writer and its file. A pipe through the
supervisor would lose lines when it is killed, and would stop every process when it is suspended.
"""

import fcntl
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

LOOK_S: Final = 5.0
"""Seconds between looks at what the process did not write itself: lines of C libraries, rotations by its other ranks."""
_PATH: Final = "GSPO_LOG_FILE"
_MAX_BYTES: Final = "GSPO_LOG_BYTES"
_MOST_FILES: Final = "GSPO_LOG_FILES"


@dataclass(frozen=True, kw_only=True)
class LogLimits:
    """How much of a log is kept: ``most_files`` files, the newest included, each of about ``max_bytes``."""

    max_bytes: int = 64 * 2**20
    most_files: int = 5


USUAL_LIMITS: Final = LogLimits()


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """A log and its older files, ``NAME.log.1`` the newest of them."""

    path: Path
    limits: LogLimits

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the log that ``gspo run`` has given this process; None when something else keeps its output."""
        if _PATH not in environment:
            return None
        limits = LogLimits(max_bytes=int(environment[_MAX_BYTES]), most_files=int(environment[_MOST_FILES]))
        return cls(path=Path(environment[_PATH]), limits=limits)

    def environment(self) -> dict[str, str]:
        """Variables that make a process, and its own ranks, rotate this log."""
        limits = self.limits
        return {_PATH: str(self.path), _MAX_BYTES: str(limits.max_bytes), _MOST_FILES: str(limits.most_files)}

    def is_behind(self, descriptor: int) -> bool:
        """Return whether ``descriptor`` writes to the newest file of this log."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except OSError:
            return False

    def keep_small(self, descriptor: int) -> None:
        """Begin a new file when that of ``descriptor`` is full. Cheap: it may be called before each write."""
        with suppress(OSError):
            if os.fstat(descriptor).st_size > self.limits.max_bytes:
                self.keep(descriptor)

    def keep(self, *descriptors: int) -> None:
        """Let ``descriptors``, which write to this log, write to its newest file. Begin that file if the log is full.

        While the disk or another process forbids it, nothing changes, and the next call tries again.
        """
        with suppress(OSError):
            here = os.fstat(descriptors[-1])
            if here.st_size <= self.limits.max_bytes and self.is_behind(descriptors[-1]):
                return
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                # Another process may be suspended while it holds the lock, so nobody waits for it.
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._follow(descriptors, here)
            finally:
                os.close(directory)

    def watch(self, *descriptors: int) -> None:
        """``keep`` them, whoever fills or rotates the log: C libraries, other ranks of this process. Never ends."""
        nothing = threading.Event()

        def look() -> None:
            while not nothing.wait(LOOK_S):
                self.keep(*descriptors)

        threading.Thread(target=look, name="log-file", daemon=True).start()

    def _follow(self, descriptors: tuple[int, ...], here: os.stat_result) -> None:
        newest = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not os.path.samestat(os.fstat(newest), here):
                _replace(descriptors, here, newest)  # Another process was faster, or the file was removed.
            elif here.st_size > self.limits.max_bytes:
                self._rotate(descriptors, here)
        finally:
            os.close(newest)

    def _rotate(self, descriptors: tuple[int, ...], here: os.stat_result) -> None:
        begun = Path(f"{self.path}.new")
        following = os.open(begun, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            files = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self.limits.most_files))]
            for older, newer in zip(reversed(files), reversed(files[:-1]), strict=False):
                if newer.exists():
                    newer.rename(older)
            begun.rename(self.path)
            _replace(descriptors, here, following)
        finally:
            os.close(following)


def _replace(descriptors: tuple[int, ...], former: os.stat_result, new: int) -> None:
    """Let those of ``descriptors`` that write to the file ``former`` write to that of ``new``. Between, nothing is lost."""
    for descriptor in descriptors:
        if os.path.samestat(os.fstat(descriptor), former):
            os.dup2(new, descriptor)


def read_end(path: Path, most_bytes: int) -> str:
    """Return the last ``most_bytes`` of a log, with its older file if the newest has fewer; empty without a log.

    Bytes that are not UTF-8 are replaced. Raises: OSError when the log is there and cannot be read.
    """
    newest, same = _end_of(path, most_bytes, None)
    if len(newest) < most_bytes:
        older, _ = _end_of(Path(f"{path}.1"), most_bytes - len(newest), same)
        newest = older + newest
    return newest.decode(errors="replace")


def _end_of(path: Path, most_bytes: int, other_than: os.stat_result | None) -> tuple[bytes, os.stat_result | None]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if other_than is not None and os.path.samestat(found, other_than):
                return b"", found  # It was rotated while it was read.
            file.seek(max(0, found.st_size - most_bytes))
            return file.read(), found
    except FileNotFoundError:
        return b"", None
