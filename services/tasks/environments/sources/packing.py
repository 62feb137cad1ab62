"""Opens a text file, unpacked where its name ends with .gz or .zst, and says so when its name is wrong."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PACKED: Final = (".gz", ".zst")
MAX_LINE_BYTES: Final = 256 << 20
"""Of one line: what a program with its tests takes, and no more memory than a broker has."""
FREE_UNPACKED_BYTES: Final = 1 << 30
MAX_EXPANSION: Final = 100
"""A packed file may unpack to a GiB, or to so many times its own size. Rows of text take 3 to 20 times."""
UTF8_MARK: Final = b"\xef\xbb\xbf"
LFS_POINTER: Final = b"version https://git-lfs"
_OTHER_KINDS: Final = (
    (b"\x1f\x8b", "is packed by gzip: add .gz to its name"),
    (b"\x28\xb5\x2f\xfd", "is packed by zstd: add .zst to its name"),
    (b"\xff\xfe", "is UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16: save it as UTF-8"),
    (b"PAR1", "is a Parquet file: end its name with .parquet"),
    (b"PK\x03\x04", "is a zip archive or a workbook of Excel: unpack it, or save its rows as .csv"),
)


def require_no_pointer(path: Path, head: bytes) -> None:
    """Raises: ValueError for the few lines that stand for a file until Git LFS has fetched it."""
    if head.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a pointer of Git LFS, and the rows lie elsewhere: fetch them with `git lfs pull`")


@contextmanager
def open_text(path: Path) -> Iterator[TextBytes]:
    """The bytes of a text file, without a byte-order mark.

    Raises: ValueError that names the file when it is packed and damaged, or is of another kind than its name says; OSError.
    """
    suffix = path.suffix.lower()
    with path.open("rb") as plain:
        if suffix == ".gz":
            with _faults_named(path), gzip.GzipFile(fileobj=plain) as unpacked:
                yield TextBytes(path, unpacked)
        elif suffix == ".zst":
            # Only Parquet, Arrow and zstd need these tens of megabytes.
            import pyarrow

            with _faults_named(path), pyarrow.CompressedInputStream(pyarrow.PythonFile(plain), "zstd") as stream:
                yield TextBytes(path, io.BufferedReader(stream, 1 << 16))
        else:
            yield TextBytes(path, plain)


class TextBytes:
    """Lines of a file, and no more of them than its size explains: packed kilobytes can unpack to terabytes."""

    def __init__(self, path: Path, stream: io.BufferedReader | gzip.GzipFile) -> None:
        """Raises: ValueError for a file of another kind."""
        self._path = path
        self._stream = stream
        is_packed = path.suffix.lower() in PACKED
        self._most = max(FREE_UNPACKED_BYTES, MAX_EXPANSION * path.stat().st_size) if is_packed else None
        self._num_bytes = 0
        head = stream.peek(64)
        require_no_pointer(path, head)
        for magic, what in _OTHER_KINDS:
            if head.startswith(magic):
                raise ValueError(f"{path} {what}")
        if head.startswith(UTF8_MARK):
            stream.read(len(UTF8_MARK))

    def lines(self) -> Iterator[bytes]:
        """Every line, with its end. Raises: ValueError for one that is too long, and for a file that unpacks to too much."""
        number = 0
        while line := self._stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{self._path}, line {number}: it is longer than {MAX_LINE_BYTES >> 20} MiB, as no row is")
            self._count(line)
            yield line

    def whole(self, most: int) -> bytes:
        """All that is left. Raises: ValueError above ``most`` bytes."""
        room = most if self._most is None else min(most, self._most - self._num_bytes)
        content = self._stream.read(room + 1)
        self._count(content)
        if len(content) > most:
            raise ValueError(
                f"{self._path} has more than {most >> 20} MiB, and .json is read whole: write it as .jsonl, one row a line"
            )
        return content

    def _count(self, part: bytes) -> None:
        self._num_bytes += len(part)
        if self._most is not None and self._num_bytes > self._most:
            raise ValueError(
                f"{self._path} unpacks to more than {self._most >> 20} MiB, which is {MAX_EXPANSION} times its size or "
                "more: unpack it yourself if you trust it"
            )


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} does not unpack ({error}): it was cut short or damaged; copy it again") from error
