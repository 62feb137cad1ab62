"""Structured logs on standard error: one event per line, JSON unless it is a terminal."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, TextIO, cast

import structlog

from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.output import forgive_output
from gspo_services.shared.runtime.plain_text import indented_lines

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
MOST_CHARACTERS: Final = 8192
"""Of one text in a line of the log: readers of a log's end find whole lines in it."""
BURST: Final = 1000
PER_S: Final = 20
"""Lines of one event. A run at full speed stays far below; a peer that floods a process fills no disk."""


class OccasionalLog:
    """Bounds lines that peers can cause as often as they like: ``burst`` of each key within ``every_s``.

    The next one says how many were left out. Beyond ``max_keys`` keys within ``every_s``, all further ones of an event count
    as one key, so that new names do not get new lines for ever.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        clock: Clock,
        every_s: float = 10.0,
        *,
        burst: int = 1,
        max_keys: int = 1024,
    ) -> None:
        self._log = log
        self._clock = clock
        self._every_s = every_s
        self._burst = burst
        self._max_keys = max_keys
        self._said: dict[Hashable, _Said] = {}

    def warning(self, event: str, key: Hashable, /, **fields: object) -> None:
        """Log ``event`` as a warning unless enough with this ``key`` were logged recently."""
        self.log(event, key, "warning", **fields)

    def log(self, event: str, key: Hashable, level: str, /, **fields: object) -> None:
        """Log ``event`` unless enough with this ``key`` were logged recently."""
        now = self._clock.now()
        said = self._of(event, key, now)
        if now - said.since >= self._every_s:
            said.since, said.lines = now, 0
        if said.lines >= self._burst:
            said.left_out += 1
            return
        said.lines += 1
        left_out, said.left_out = said.left_out, 0
        write = self._log.warning if level == "warning" else self._log.info
        write(event, **fields, **({"left_out": left_out} if left_out else {}))

    def _of(self, event: str, key: Hashable, now: float) -> "_Said":
        said = self._said.get(key)
        if said is not None:
            return said
        if len(self._said) >= self._max_keys:
            self._forget(now)
        if len(self._said) >= self._max_keys:
            key = _Others(event)
        return self._said.setdefault(key, _Said(since=now))

    def _forget(self, now: float) -> None:
        """Forget the keys that were quiet lately; what was left out about them is summed up."""
        old = [key for key, said in self._said.items() if now - said.since >= self._every_s]
        left_out = sum(self._said.pop(key).left_out for key in old)
        if left_out:
            self._log.warning("lines_left_out", left_out=left_out, about=len(old))


@dataclass(frozen=True)
class _Others:
    """The key of all keys for which there is no room."""

    event: str


@dataclass
class _Said:
    """What was logged about one key: how many lines since when, and how many were left out."""

    since: float
    lines: int = 0
    left_out: int = 0


class EventLimit:
    """A processor that bounds how often each event is logged, whatever peers do: ``burst`` at once, ``per_s`` for long.

    The next line of an event says how many were left out before it. Events are named by the code, so there are few.
    """

    def __init__(self, *, burst: float = BURST, per_s: float = PER_S, now: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_s = per_s
        self._now = now
        self._left: dict[str, tuple[float, float, int]] = {}
        """For each event: how many may be logged at once, since when, and how many were left out."""

    def __call__(self, _: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        name, now = str(event.get("event")), self._now()
        left, since, left_out = self._left.get(name, (self._burst, now, 0))
        left = min(self._burst, left + (now - since) * self._per_s)
        if left < 1:
            self._left[name] = (left, now, left_out + 1)
            raise structlog.DropEvent
        self._left[name] = (left - 1, now, 0)
        if left_out:
            event["left_out"] = left_out + (event["left_out"] if isinstance(event.get("left_out"), int) else 0)
        return event


def bound_texts(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Process an event so that no text takes more than a part of the log."""
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            end = value[-MOST_CHARACTERS // 4 :]  # A traceback says there what it is about.
            event[name] = f"{value[: MOST_CHARACTERS * 3 // 4]}... ({len(value):,} characters) ...{end}"
    return event


def show_traceback_plainly(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Process an event for a terminal: a traceback keeps its lines, without control characters that a peer sent."""
    if isinstance(event.get("exception"), str):
        event["exception"] = indented_lines(event["exception"])
    return event


class _CurrentError:
    """Standard error as it is when a line is written: a live table on the terminal puts itself in its place, and shows lines
    above."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_logging(service: str, usual_level: str = "info") -> None:
    """Set up structlog for this process, at the level GSPO_LOG_LEVEL: debug, info, warning or error; else ``usual_level``.

    From here on a full disk costs lines of the log, and never the process or its exit status.

    Raises: ValueError for another level.
    """
    level = os.environ.get("GSPO_LOG_LEVEL", usual_level).lower()
    if level not in LEVELS:
        raise ValueError(f"GSPO_LOG_LEVEL is {level!r}: use one of {', '.join(LEVELS)}")
    forgive_output()
    rendering: list[structlog.typing.Processor] = (
        # ``repr`` escapes control characters, and so does JSON.
        [show_traceback_plainly, structlog.dev.ConsoleRenderer(repr_native_str=True)]
        if sys.stderr.isatty()
        else [structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            EventLimit(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            bound_texts,
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _CurrentError())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Log nothing inside the block: a command's own report says it better. Afterwards logging is as before."""
    before = structlog.get_config()
    # Loggers that are used inside must not keep this level.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
