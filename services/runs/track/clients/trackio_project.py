"""Trackio: a run in the project ``trackers.project``, in its local database or at TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

import os
import threading
from typing import Any, Final

import trackio
from trackio.sqlite_storage import SQLiteStorage

from gspo_services.runs.track.clients.tracker import TrackerRun
from gspo_services.runs.track.points import LINE, Point
from gspo_services.runs.track.samples import SAMPLES, SampleTable

FLUSH_S: Final = 30.0
LOOK_S: Final = 0.1
ELSEWHERE: Final = ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")


class TrackioRun:
    """One run of Trackio. Its client sends in the background and only warns when it fails, so we check."""

    def __init__(self, run: Any, project: str) -> None:
        self._run = run
        self._project = project
        self._written = 0
        self._local = not any(os.environ.get(name) for name in ELSEWHERE)

    def last_line(self) -> int | None:
        if not self._local:
            return None
        values: list[dict[str, Any]] = SQLiteStorage.get_metric_values(self._project, self._run.name, LINE)
        return max((int(each["value"]) for each in values), default=0)

    def write(self, point: Point, samples: SampleTable | None) -> None:
        values: dict[str, Any] = dict(point.values)
        if samples is not None:
            values[SAMPLES] = trackio.Table(columns=list(samples.columns()), data=samples.rows())
        self._run.log(values, step=point.batch)
        self._written = point.line

    def flush(self) -> None:
        nothing = threading.Event()
        for _ in range(round(FLUSH_S / LOOK_S)):
            if (self.last_line() or self._written) >= self._written:
                return
            nothing.wait(LOOK_S)
        raise RuntimeError(
            f"it has not stored line {self._written} of metrics.jsonl within {FLUSH_S:.0f} s; see its warnings"
        )

    def close(self) -> None:
        self._run.finish()


def open_trackio(run: TrackerRun) -> TrackioRun:
    """Resume the run, or create it with its settings."""
    opened = trackio.init(
        project=run.project, name=run.name, resume="allow", config={**run.code, **run.settings}, embed=False,
        auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip
    return TrackioRun(opened, run.project)
