"""The log of what the user's code prints: one file of bounded size beside an older one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from gspo_services.shared.runtime.plain_text import one_line

log = structlog.get_logger(__name__)

MAX_LINE_CHARS: Final = 2000


class UserOutput:
    """Writes printable lines under the name of who printed them. It never fails, and never grows beyond two files."""

    def __init__(self, path: Path | None = None, max_bytes: int = 16 * 1024 * 1024) -> None:
        """``path``: the newest file; the older one is ``path``.1. None: nothing is kept."""
        self._path = path
        self._max_bytes = max_bytes
        self._said_lost = False

    def write(self, source: str, text: str) -> None:
        """Append the lines of ``text``, which ``source`` printed."""
        if self._path is None:
            return
        lines = "".join(f"{source}: {one_line(line, MAX_LINE_CHARS)}\n" for line in text.splitlines())
        try:
            if self._path.exists() and self._path.stat().st_size + len(lines) > self._max_bytes:
                self._path.replace(f"{self._path}.1")
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(lines)
        except OSError as error:
            if not self._said_lost:
                log.warning("user_output_lost", path=str(self._path), error=error.strerror)
            self._said_lost = True
