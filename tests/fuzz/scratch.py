"""Files for boundaries that read only files."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def scratch() -> Path:
    """A folder, in memory where possible, that is removed when the process ends."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="gspo-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, owner: int) -> None:
    """Remove the folder, but not when a fork ends: it shares the folder."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def written(name: str, data: bytes) -> Path:
    """A file with this content."""
    path = scratch() / name
    path.write_bytes(data)
    return path
