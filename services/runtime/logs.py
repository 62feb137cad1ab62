"""Structured logs: one event a line, JSON off a terminal, on standard error."""

import logging
import os
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import TextIO, cast

import structlog

from services.runtime.clock import Clock

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class PatientFile:
    """A text file of which a write that fails is left out: a full disk must cost lines of the log, not the process."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._file.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


class OccasionalLog:
    """Warnings that peers can cause as often as they like: one every ``every_s`` of each key, which says how many were left
    out since the last."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger, clock: Clock, every_s: float = 10.0) -> None:
        self._log = log
        self._clock = clock
        self._every_s = every_s
        self._said: dict[Hashable, tuple[float, int]] = {}

    def warning(self, event: str, key: Hashable, /, **fields: object) -> None:
        """Log ``event`` unless one of ``key``, which must come from a closed set, was logged lately."""
        now = self._clock.now()
        last, left_out = self._said.get(key, (now - self._every_s, 0))
        if now - last < self._every_s:
            self._said[key] = (last, left_out + 1)
            return
        self._said[key] = (now, 0)
        self._log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))


def configure_logging(service: str) -> None:
    """Set up structlog for this process. GSPO_LOG_LEVEL is debug, info (default), warning or error.

    Raises: ValueError for another level.
    """
    level = os.environ.get("GSPO_LOG_LEVEL", "info").lower()
    if level not in LEVELS:
        raise ValueError(f"GSPO_LOG_LEVEL is {level!r}: use one of {', '.join(LEVELS)}")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", PatientFile(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
