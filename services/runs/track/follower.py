"""Follows metrics.jsonl while the broker writes it: each whole line once, in the order of its numbers."""

import json
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]

BLOCK_BYTES: Final = 4 * 2**20
"""Read at once; a line has some kilobytes."""
MOST_LINE_BYTES: Final = 64 * 2**20
"""A "line" that is longer is not the broker's, and is passed over."""


class MetricsFollower:
    """Reads what was appended since the last call.

    The broker numbers its lines ("record"). The number says what was read, and the place in the file is only a hint: a
    file that was cut, replaced or written anew is read from its beginning, and lines that are known are passed over.
    """

    def __init__(self, path: Path, last: int = 0) -> None:
        """``last``: the number of the last line that is known already."""
        self.path = path
        self.last = last
        self.num_unreadable = 0
        """Whole lines that were no numbered JSON object: somebody else wrote them. They are passed over."""
        self._offset = 0
        self._file_id = (0, 0)

    def read(self) -> list[Row]:
        """The next rows, at most those of one block; none when there is nothing new. A half line waits for its end.

        Raises: OSError other than for a missing file.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                size = file.tell()
                self._begin_again_if_replaced(file, size)
                while self._offset < size:
                    file.seek(self._offset)
                    block = file.read(BLOCK_BYTES)
                    end = block.rfind(b"\n") + 1
                    if not end:
                        block += file.read(MOST_LINE_BYTES)
                        end = block.find(b"\n") + 1
                        if not end and len(block) < MOST_LINE_BYTES:
                            return []
                        end = end or len(block)
                    self._offset += end
                    rows = self._new_rows(block[:end])
                    if rows:
                        return rows
        except FileNotFoundError:
            self._offset = 0
        return []

    def _begin_again_if_replaced(self, file: Any, size: int) -> None:
        stat = self.path.stat()
        found = (stat.st_dev, stat.st_ino)
        ends_a_line = True
        if 0 < self._offset <= size:
            file.seek(self._offset - 1)
            ends_a_line = file.read(1) == b"\n"
        if found != self._file_id or size < self._offset or not ends_a_line:
            self._offset = 0
        self._file_id = found

    def _new_rows(self, block: bytes) -> list[Row]:
        rows = []
        for line in block.split(b"\n"):
            row = self._parsed(line)
            if row is not None and row["record"] > self.last:
                self.last = row["record"]
                rows.append(row)
        return rows

    def _parsed(self, line: bytes) -> Row | None:
        # A file that was rotated under the broker begins with a hole, where its former lines would be.
        text = line.strip(b"\0 \r\t")
        if not text:
            return None
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("record")) is int and row["record"] > 0:
            return row
        self.num_unreadable += 1
        return None
