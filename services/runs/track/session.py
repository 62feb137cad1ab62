"""Sends a run to one tracker: follows metrics.jsonl, and continues where the tracker itself stands."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.metrics import MetricsFollower
from gspo_services.runs.track.clients import Tracker
from gspo_services.runs.track.cursor import Cursor, CursorFile
from gspo_services.runs.track.points import Point, Translation
from gspo_services.runs.track.samples import SampleReader, SampleTable
from gspo_services.shared.runtime.errors import ServiceError

log = structlog.get_logger()
T = TypeVar("T")

POLL_S: Final = 1.0
FIRST_RETRY_S: Final = 2.0
MOST_RETRY_S: Final = 60.0
POINTS_AT_ONCE: Final = 64
"""Seconds between two flushes."""


class TrackerRefused(ServiceError):
    """The tracker's client raised an error; the text quotes it."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The source of samples, and how many to send of an evaluation; 0: none."""

    reader: SampleReader
    most: int


class TrackerSession:
    """One run's lines, sent to one tracker."""

    def __init__(
        self, directory: Path, file: CursorFile, cursor: Cursor, open_tracker: Callable[[], Tracker], samples: Samples
    ) -> None:
        self._directory = directory
        self._file = file
        self.cursor = cursor
        self._open = open_tracker
        self._samples = samples
        self._problem = ""
        self._told: set[str] = set()

    def follow(self, stop: threading.Event) -> None:
        """Send what exists and what comes, until ``stop``; then whatever has come by then.

        produces:     points at the tracker; the cursor
        waits for:    lines of metrics.jsonl; a tracker that refuses, ever longer
        unblocked by: the broker; the tracker; ``stop``
        """
        delay_s = FIRST_RETRY_S
        while True:
            try:
                self._send_all(stop)
                return
            except TrackerRefused as error:
                self._note(msgspec.structs.replace(self.cursor, error=str(error)))
                log.warning("tracker_refused", error=str(error), retry_s=delay_s)
            if stop.is_set():
                return  # `gspo track` can send what is missing later.
            stop.wait(delay_s)
            delay_s = min(2 * delay_s, MOST_RETRY_S)

    def send(self) -> int:
        """Send what exists now. Returns the number of the last line that the tracker has. Raises: TrackerRefused."""
        stop = threading.Event()
        stop.set()
        self._send_all(stop)
        return self.cursor.line

    def _send_all(self, stop: threading.Event) -> None:
        tracker = _foreign(self._open)
        try:
            self._feed(tracker, stop)
        except BaseException:
            # The error is already known; closing a broken client adds nothing.
            threading.Thread(target=_quietly, args=(tracker.close,), daemon=True).start()
            raise
        _foreign(tracker.close)

    def _feed(self, tracker: Tracker, stop: threading.Event) -> None:
        sent = _foreign(tracker.last_line)
        sent = self.cursor.line if sent is None else sent
        follower = MetricsFollower(self._directory / METRICS_FILE)
        translation = Translation()
        while True:
            last_time = stop.is_set()
            rows = follower.read()
            points = [point for row in rows if (point := translation.point(row)) is not None and point.line > sent]
            for first in range(0, len(points), POINTS_AT_ONCE):
                part = points[first : first + POINTS_AT_ONCE]
                self._note(msgspec.structs.replace(self.cursor, behind=follower.last - self.cursor.line))
                for point in part:
                    _foreign(partial(tracker.write, point, self._samples_of(point)))
                _foreign(tracker.flush)
                # Later lines that are no points may follow, so this is not yet all that was read.
                self._note(msgspec.structs.replace(self.cursor, line=part[-1].line, error=""))
            if rows:
                done = msgspec.structs.replace(self.cursor, line=max(follower.last, sent), behind=0, error="")
                self._note(done)
                continue
            follower.tell_damage(self._tell)
            if last_time:
                return
            stop.wait(POLL_S)

    def _tell(self, damage: str) -> None:
        if damage not in self._told:  # A reopened tracker gets the same file.
            self._told.add(damage)
            log.warning("lines_left_out", damage=damage)

    def _samples_of(self, point: Point) -> SampleTable | None:
        if point.event != "eval" or not self._samples.most:
            return None
        table = self._samples.reader.evaluation(point.batch, self._samples.most)
        if table is None or not table.samples:
            problem = self._samples.reader.problem or "the ledger has no finished answer"
            if problem != self._problem:  # Once, not after each evaluation.
                self._problem = problem
                log.warning("no_samples", batch=point.batch, reason=problem)
            return None
        return table

    def _note(self, cursor: Cursor) -> None:
        if cursor == self.cursor:
            return
        self.cursor = cursor
        try:
            self._file.write(cursor)
        except OSError as error:
            # A full disk: the tracker itself knows what it has.
            log.warning("cursor_not_written", file=str(self._file.path), error=error.strerror)


def _foreign(call: Callable[[], T]) -> T:
    """Call a tracker's client. Raises: TrackerRefused for whatever it raises."""
    try:
        return call()
    except Exception as error:  # Four clients, each with its own errors.
        raise TrackerRefused(f"{type(error).__name__}: {error}") from error


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        log.debug("tracker_not_closed", error=str(error))
