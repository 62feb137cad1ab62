"""Reads metrics.jsonl, even while the broker writes it: each whole line once, in the order of the lines' numbers.

A line that is damaged costs itself alone. It is left out and counted, and the user is told once for each file.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

from gspo_services.runs.metrics.rows import Row, parsed

BLOCK_BYTES: Final = 4 * 2**20
"""Bytes read at once; a line has some kilobytes."""
MOST_LINE_BYTES: Final = 8 * 2**20
"""A longer line is not the broker's."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is left out of one file."""

    path: Path
    num_lines: int
    first_line: int
    """Counted from 1."""
    reason: str
    """What is wrong with the first line."""

    def __str__(self) -> str:
        are = "line is" if self.num_lines == 1 else "lines are"
        return f"{self.path}: {self.num_lines} damaged {are} left out; the first is line {self.first_line}: {self.reason}"


class MetricsFollower:
    """Reads what was appended since the last call.

    The broker numbers its lines ("line"). The number says what was read, and the place in the file is only a hint: a
    file that was cut, replaced or written anew is read from its beginning, and lines that are known are passed over.
    """

    def __init__(self, path: Path, *, most_line_bytes: int = MOST_LINE_BYTES) -> None:
        self.path = path
        self.last = 0
        """The number of the last row that was given out."""
        self._most = most_line_bytes
        self._file_id = (0, 0)
        self._is_told = False
        self._begin_again()

    def _begin_again(self) -> None:
        self.damage: Damage | None = None
        """The position in the current file up to which it was read."""
        self._offset = 0
        self._line = 0
        self._before = 0
        """The number of the last row in the file, whether it was known or not."""
        self._at_line_start = True
        self._in_long_line = False

    def read(self) -> list[Row]:
        """The next rows, about those of one block; none when there is nothing new. An unfinished line waits for its end.

        Raises: OSError other than for a missing file.
        """
        try:
            with self.path.open("rb") as file:
                self._begin_again_if_replaced(file)
                return self._next_rows(file)
        except FileNotFoundError:
            self._begin_again()
            return []

    def rows(self) -> Iterator[Row]:
        """Yield all rows that were not given out yet. Raises: OSError other than for a missing file."""
        while found := self.read():
            yield from found

    def tell_damage(self, tell: Callable[[str], None]) -> None:
        """Report the file's damage, unless that was done before. Call it when everything has been read."""
        if self.damage is not None and not self._is_told:
            self._is_told = True
            tell(str(self.damage))

    def _begin_again_if_replaced(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        found = (stat.st_dev, stat.st_ino)
        is_same = found == self._file_id and stat.st_size >= self._offset
        if is_same and self._offset and self._at_line_start:
            file.seek(self._offset - 1)
            is_same = file.read(1) == b"\n"
        if not is_same:
            self._begin_again()
        self._file_id = found

    def _next_rows(self, file: BinaryIO) -> list[Row]:
        rows: list[Row] = []
        file.seek(self._offset)
        end = self._offset + BLOCK_BYTES
        while not rows or self._offset < end:
            piece = file.readline(self._most)
            is_end = piece.endswith(b"\n")
            if not is_end and len(piece) < self._most:
                break
            self._offset += len(piece)
            self._at_line_start = is_end
            # A file that was rotated under the broker begins with a hole where its former lines would be.
            text = piece.strip(b"\0 \t\r\n")
            if self._in_long_line:
                self._in_long_line = not is_end
            elif text and not is_end:
                self._in_long_line = True
                self._leave_out(f"longer than {self._most} bytes")
            elif text:
                rows += self._new_rows(text)
            self._line += is_end
        return rows

    def _new_rows(self, text: bytes) -> list[Row]:
        """Return the row of a line, unless it is known or damaged."""
        try:
            row = parsed(text)
            if row["line"] <= self._before:
                raise ValueError(f"its number is {row['line']}, and the line before it has {self._before}")
        except ValueError as error:
            self._leave_out(str(error))
            return []
        self._before = row["line"]
        if self._before <= self.last:
            return []
        self.last = self._before
        return [row]

    def _leave_out(self, reason: str) -> None:
        if self.damage is None:
            self.damage = Damage(path=self.path, num_lines=1, first_line=self._line + 1, reason=reason)
        else:
            self.damage = replace(self.damage, num_lines=self.damage.num_lines + 1)
