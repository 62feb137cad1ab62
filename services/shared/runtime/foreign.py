"""The door for directories that others wrote: backups, checkpoints, models, what a run's ledger names.

Their names are relative and plain, none of their links is followed, only regular files are opened, and sizes and numbers are
bounded. The directory itself was named by the user, who may have named a link.
"""

import errno
import hashlib
import os
import stat
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

MOST_FILES: Final = 1_000_000
MOST_DEPTH: Final = 16
MOST_MANIFEST_BYTES: Final = 256 * 2**20
"""Of a list of MOST_FILES files with their digests."""
_MOST_NAME_BYTES: Final = 1024
_MOST_PART_BYTES: Final = 255
_BLOCK: Final = 1 << 20
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: opening a pipe would wait for its writer."""


class ForeignError(ValueError):
    """A name, a link, a special file or a size that nobody here takes. The text names it."""


def name_problem(name: str) -> str:
    """Why ``name`` is no relative, plain name of a file below a directory; empty: it is one."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts):
        return f"{name[:100]!r} is no plain relative name"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return f"{name[:100]!r} has control characters"
    if len(name.encode()) > _MOST_NAME_BYTES or max(len(part.encode()) for part in parts) > _MOST_PART_BYTES:
        return f"{name[:100]!r}... has {len(name.encode())} bytes"
    return f"{name[:100]!r} is {len(parts)} folders deep" if len(parts) > MOST_DEPTH else ""


def require_names(names: Collection[str]) -> None:
    """Raises: ForeignError for the first that is not plain, and for more than MOST_FILES."""
    if len(names) > MOST_FILES:
        raise ForeignError(f"{len(names)} files, at most {MOST_FILES} are taken")
    if problem := next(filter(None, map(name_problem, names)), ""):
        raise ForeignError(problem)


class ForeignTree:
    """One directory of others, and its files by their names below it. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def open(self, name: str) -> Iterator[FileIO]:
        """Open a regular file, unbuffered. Raises: ForeignError for a bad name, a link, a special file; OSError."""
        if problem := name_problem(name):
            raise ForeignError(f"{self.root}: {problem}")
        *folders, last = name.split("/")
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                at = self._step(at, folder, name, os.O_DIRECTORY)
            at = self._step(at, last, name, 0)
            if not stat.S_ISREG(os.fstat(at).st_mode):
                raise ForeignError(f"{self.root / name} is no regular file")
            with FileIO(at, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(at)

    def _step(self, at: int, part: str, name: str, flags: int) -> int:
        """Open ``part`` of the directory ``at``, which is closed then."""
        try:
            found = os.open(part, _FLAGS | flags, dir_fd=at)
        except OSError as error:
            # ENXIO: a socket. ENOTDIR: also a link that a directory is asked for.
            if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(part, at)):
                raise ForeignError(f"{self.root / name} is a link, or lies behind one: links are not followed") from error
            if error.errno == errno.ENXIO:
                raise ForeignError(f"{self.root / name} is no regular file") from error
            raise OSError(error.errno, error.strerror, str(self.root / name)) from error
        os.close(at)
        return found

    def num_bytes(self, name: str) -> int:
        """Size of a file. Raises: as ``open``."""
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, most_bytes: int = MOST_MANIFEST_BYTES) -> bytes:
        """What a small file holds. Raises: ForeignError for a larger one; as ``open``."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise ForeignError(f"{self.root / name} has {size} bytes, at most {most_bytes} are read")
            return b"".join(_blocks(file, size))

    def sha256(self, name: str) -> str:
        """Digest of a file, in hexadecimal. Raises: as ``open``."""
        with self.open(name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def require(self, sizes: Mapping[str, int]) -> None:
        """Check a whole manifest before anything of it is used: every file is there, regular, behind no link, with its size.

        Raises: as ``open``; ForeignError.
        """
        require_names(sizes)
        for name, expected in sizes.items():
            if (found := self.num_bytes(name)) != expected:
                raise ForeignError(f"{self.root / name} has {found} bytes, {expected} were written")

    def copy(self, name: str, num_bytes: int, destination: Path) -> str:
        """Copy the first ``num_bytes`` of a file to ``destination``, which is not there yet, reading no more.

        Returns their SHA-256, in hexadecimal. Raises: ForeignError when there are fewer; as ``open``.
        """
        digest, copied = hashlib.sha256(), 0
        with self.open(name) as file, destination.open("xb") as writing_to:
            for block in _blocks(file, num_bytes):
                digest.update(block)
                writing_to.write(block)
                copied += len(block)
        if copied != num_bytes:
            raise ForeignError(f"{self.root / name} ended after {copied} bytes, {num_bytes} were written")
        return digest.hexdigest()


def belongs_to_model(path: Path, model_dir: Path) -> bool:
    """Whether a file of a model's folder is in that folder, or in a store of the hub's cache, to which downloads link."""
    real = path.resolve()
    is_stored = real.parent.name == "blobs" and real.parents[1].name.startswith("models--")
    return real.is_file() and (is_stored or real.is_relative_to(model_dir.resolve()))


def _blocks(file: FileIO, num_bytes: int) -> Iterator[bytes]:
    """Yield at most ``num_bytes`` from where ``file`` is."""
    while num_bytes and (block := file.read(min(_BLOCK, num_bytes))):
        num_bytes -= len(block)
        yield block


def _is_link(part: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode)
