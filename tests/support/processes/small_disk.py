"""A small file system that tests fill and make read-only. Without the right to mount, the test is skipped."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs at ``path``."""

    path: Path

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave this much room, in whole pages. Others may write meanwhile."""
        with self._ballast.open("wb") as file:
            while True:
                free = os.statvfs(self.path)
                size = free.f_bavail * free.f_frsize - leave_bytes
                if size <= 0:
                    return
                try:
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size + size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink()

    def set_writable(self, writable: bool) -> None:
        """Mount it again. The kernel refuses read-only while files on it are open for writing: see ``remount``."""
        _mount("-o", f"remount,{'rw' if writable else 'ro'}", str(self.path))


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system of ``num_bytes`` at ``path``, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={num_bytes}", "gspo-test", str(path))
    except OSError as error:
        pytest.skip(str(error))
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
