"""Where fetched weights lie until the engine has loaded them."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.runtime.errors import ConfigurationError
from services.runtime.settings import Settings


@contextmanager
def weights_directory(settings: Settings, name: str) -> Iterator[Path]:
    """An empty directory of the rollout ``name`` of this run, gone afterwards.

    Its name follows from both, so that what a killed rollout has left in memory goes when it is started again.
    Raises: ConfigurationError when there is no such file system, or it cannot be written.
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
