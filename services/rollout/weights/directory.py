"""The directory in which fetched weights lie until the engine has loaded them."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.runtime.errors import ConfigurationError
from services.runtime.settings import Settings


@contextmanager
def weights_directory(settings: Settings, name: str) -> Iterator[Path]:
    """An empty directory for the rollout ``name`` of this run, removed afterwards.

    The run and the rollout give its name, so a rollout that starts again after a kill removes what it had left in memory.
    Raises: ConfigurationError when the parent directory is missing or not writable.
    """
    parent = settings.rollout.weights_directory
    if not parent.is_dir():
        raise ConfigurationError(
            f"rollout.weights_directory is {parent}: no such directory. Fetched weights are written there for SGLang to "
            "load; a memory file system such as /dev/shm is best"
        )
    owner = f"{settings.run.directory.resolve()}\0{name}"
    directory = parent / f"gspo-weights-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"
    try:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"rollout.weights_directory is {parent}: {error.filename} cannot be used ({error.strerror}); make it writable, "
            "or choose another one"
        ) from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
