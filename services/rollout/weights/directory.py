"""The directory of a rollout's weights: its copy of the version, and what the engine loads."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings


@contextmanager
def weights_directory(settings: Settings, name: str) -> Iterator[Path]:
    """Make the directory of rollout ``name`` of this run, and remove it afterwards.

    The run and the rollout give its name, so a rollout that starts again after a kill finds the copy that it had. While
    another process of that name still uses it, this one gets a separate, empty directory.
    Raises: ConfigurationError when the parent directory is missing or not writable.
    """
    parent = settings.rollout.weights_directory
    if not parent.is_dir():
        raise ConfigurationError(
            f"rollout.weights_directory is {parent}: no such directory. The rollout keeps its copy of the weights there, "
            "for SGLang to load; a memory file system such as /dev/shm is best"
        )
    owner = f"{settings.run.directory.resolve()}\0{name}"
    directory = parent / f"gspo-weights-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"
    locks: list[int] = []
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if _claim(directory, locks):
            _tidy(directory)
        else:
            directory = parent / f"{directory.name}-{os.getpid()}"
            directory.mkdir(mode=0o700)
            _claim(directory, locks)
    except OSError as error:
        _close(locks)
        raise ConfigurationError(
            f"rollout.weights_directory is {parent}: {error.filename} cannot be used ({error.strerror}); make it writable, "
            "or choose another one"
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _close(locks)


def _claim(directory: Path, locks: list[int]) -> bool:
    """Lock a directory until this process ends; False: another process has. The lock is added to ``locks``."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    locks.append(lock)
    return True


def _tidy(directory: Path) -> None:
    """Remove what an engine was about to load, and places of others of this name that were killed. The copy stays: it is
    taken over, or removed, by who reads its mark."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    for other in directory.parent.glob(f"{directory.name}-*"):
        claimed: list[int] = []
        if _claim(other, claimed):
            shutil.rmtree(other, ignore_errors=True)
        _close(claimed)


def _close(locks: list[int]) -> None:
    for lock in locks:
        os.close(lock)
