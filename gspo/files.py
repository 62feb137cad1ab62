"""Directories and small files that appear whole or not at all, even after kill -9 and power loss.

    made = make_partial_directory(destination)
    (made / "rows.jsonl").write_text(text)
    publish_directory(made, destination)

What is not finished lies beside its destination under another name, on the same file system. POSIX only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = [
    "discard_directory",
    "flush_file",
    "make_partial_directory",
    "partial_path",
    "publish_directory",
    "remove_leftovers",
    "replace_file",
]

_PARTIAL = ".partial-"
_DISCARDED = ".discarded-"


def partial_path(destination: Path) -> Path:
    """Return the path where the content of ``destination`` is written first."""
    return destination.with_name(_PARTIAL + destination.name)


def make_partial_directory(destination: Path) -> Path:
    """Make ``partial_path(destination)``, empty, and its parents: what an interrupted writer left there is removed.

    A destination has one writer at a time: whoever calls sees to that. Raises: OSError.
    """
    partial = partial_path(destination)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def remove_leftovers(parent: Path) -> None:
    """Remove directories that interrupted writers left in ``parent``. Only its single owner may call this."""
    for leftover in [*parent.glob(_PARTIAL + "*"), *parent.glob(_DISCARDED + "*")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)


def publish_directory(partial: Path, destination: Path, *, replace: bool = True) -> None:
    """Flush every file of ``partial`` to disk, then rename it to ``destination``.

    An existing ``destination`` is replaced, and removed after that: only for an instant neither is there. Without
    ``replace`` it may only be empty. Raises: OSError; a full disk does so while the former one still stands.
    """
    for directory, _, files in os.walk(partial):
        for name in files:
            flush_file(Path(directory) / name)
        flush_file(Path(directory))
    former = _set_aside(destination) if replace and destination.exists() else None
    partial.rename(destination)
    flush_file(destination.parent)
    if former is not None:
        shutil.rmtree(former)


def discard_directory(directory: Path) -> None:
    """Remove a directory so that a half of it is never mistaken for the whole."""
    shutil.rmtree(_set_aside(directory))


def _set_aside(directory: Path) -> Path:
    discarded = directory.with_name(_DISCARDED + directory.name)
    if discarded.exists():
        shutil.rmtree(discarded)
    directory.rename(discarded)
    return discarded


def replace_file(path: Path, text: str) -> None:
    """Write a small file in UTF-8 so that a reader sees the old content or the new. Raises: OSError."""
    partial = path.with_name(_PARTIAL + path.name)
    partial.write_text(text, encoding="utf-8")
    flush_file(partial)
    partial.rename(path)
    flush_file(path.parent)


def flush_file(path: Path) -> None:
    """Return when the file, or a directory's list of names, is on the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
