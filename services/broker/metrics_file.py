"""metrics.jsonl in the run's directory: one line per event, for people and plots.

The broker is its only writer; ``gspo_services.runs.metrics`` reads it.

The lines are durable in the store first; the file is brought up to date from there, so that neither a crash nor a full disk
loses or repeats a line.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

METRICS_FILE: Final = "metrics.jsonl"
TAIL_BYTES: Final = 1 << 20


class MetricsFile:
    """Appends numbered lines; ``last`` is the number of the last one in the file."""

    def __init__(self, path: Path) -> None:
        """Continue an existing file: a half-written last line is cut off. Raises: OSError when it cannot be used."""
        self.path = path
        self.last = 0
        self._end = 0
        if path.exists():
            last = b""
            with path.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._end += len(line)
                    last = line
            # Only the last one is parsed: a long run has tens of megabytes of them.
            self.last = _number(last) if last else 0
            if not self.last:
                self._end = 0  # edited by hand: it is rewritten from the store

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write lines that carry "line", in order. Raises: OSError; the next call overwrites what was left."""
        data = b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(self._end)
            file.seek(self._end)
            file.write(data)
        self._end += len(data)
        if lines:
            self.last = int(lines[-1]["line"])


def last_line(path: Path) -> int:
    """The number of a file's last whole line; 0 without one, or when the broker did not write it. Raises: OSError."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except (FileNotFoundError, IsADirectoryError):
        return 0
    whole = [line for line in lines if line.endswith(b"\n")]
    return _number(whole[-1]) if whole else 0


def _number(line: bytes) -> int:
    """The number of a line that the broker wrote; 0 for any other line."""
    try:
        number = json.loads(line)["line"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return number if isinstance(number, int) and number > 0 else 0
