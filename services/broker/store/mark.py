"""The high-water mark: a small file beside the ledger that says how far the ledger had come.

It is written after every commit and before anything that depends on it leaves the broker. So it survives what the ledger may
not: a write-ahead log that is lost or damaged, an old copy put back in place. A kill of the process leaves it whole; after a
power loss it may be a second behind, which proves less but never too much.
"""

import os
import time
import zlib
from pathlib import Path
from typing import Final

import msgspec

from gspo_services.broker.store.commits import Commit

MARK_FILE: Final = "ledger.mark"
SLOT_BYTES: Final = 512
"""A slot is one sector: a torn write damages at most the slot that it writes, and the other one is one commit older."""
FLUSH_S: Final = 1.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The last commit of a run, as far as its mark knows."""

    run_id: str
    commit: Commit


class MarkFile:
    """The mark of one ledger, for its only writer."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._flushed = -FLUSH_S
        if os.fstat(self._descriptor).st_size < 2 * SLOT_BYTES:
            # Both slots have their room on the disk from now on: a disk that is full later does not stop the mark.
            os.pwrite(self._descriptor, b" " * (2 * SLOT_BYTES), 0)

    def write(self, mark: Mark) -> None:
        """Write it where other processes, and the next life of this one, see it. Raises: OSError."""
        data = msgspec.json.encode(mark)
        record = (b"%08x " % zlib.crc32(data) + data).ljust(SLOT_BYTES - 1) + b"\n"
        os.pwrite(self._descriptor, record, mark.commit.number % 2 * SLOT_BYTES)
        now = time.monotonic()
        if now - self._flushed >= FLUSH_S:
            self._flushed = now
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Flush it to the disk, and close it."""
        try:
            os.fdatasync(self._descriptor)
        finally:
            os.close(self._descriptor)


def read_mark(path: Path) -> Mark | None:
    """The mark in a file; None when there is none, or none that can be read. Raises: OSError for other reasons."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    marks = [mark for at in (0, SLOT_BYTES) if (mark := _read_slot(content[at : at + SLOT_BYTES])) is not None]
    return max(marks, key=lambda mark: mark.commit.number, default=None)


def _read_slot(record: bytes) -> Mark | None:
    checksum, _, data = record.rstrip().partition(b" ")
    try:
        return msgspec.json.decode(data, type=Mark) if int(checksum, 16) == zlib.crc32(data) else None
    except ValueError:
        return None
