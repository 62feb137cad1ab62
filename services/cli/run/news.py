"""Brings events of a run to its display: rows of metrics.jsonl, processes, checkpoints, trackers, samples."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.cli.run.display import Display
from gspo_services.cli.run.happenings import Happening, Happenings
from gspo_services.cli.run.starts import Starts
from gspo_services.cli.run.supervisor import Child
from gspo_services.runs.metrics import MetricsFollower, Row
from gspo_services.runs.track import CursorFile, Sample, SampleReader
from gspo_services.shared.colocate import LOCK_FILE, device_holder
from gspo_services.shared.learning import LearningWatch, counted_components
from gspo_services.shared.settings import Settings

SAMPLED: Final = 16
"""Samples rotate over so many held-out tasks, one at each evaluation."""


class News:
    """Looks at the files of a run on this machine; it only reads."""

    def __init__(self, settings: Settings) -> None:
        directory = settings.run.directory
        self._follower = MetricsFollower(directory / METRICS_FILE)
        self._samples = SampleReader(directory, settings.model.path)
        self._cursors = {name: CursorFile(directory, name) for name in settings.trackers.to}
        counted = counted_components(settings.environment.options, settings.reward.group_weights)
        self._happenings = Happenings(settings.batch.max_lag, LearningWatch(counted))
        self._starts = Starts()
        self._is_first = True
        self._shown = 0
        self._lock_file = directory / LOCK_FILE if settings.run.colocate else None

    async def bring(
        self, display: Display, status: dict[str, Any] | None, children: Sequence[Child], elapsed_s: float
    ) -> None:
        """Tell ``display`` what is new. ``status``: the broker's; None while it does not answer."""
        display.device_holder = device_holder(self._lock_file) if self._lock_file is not None else ""
        rows = self._new_rows(display)
        happened = self._happenings.of_rows(rows)
        self._follower.tell_damage(lambda text: happened.append(Happening(text=text, is_problem=True)))
        happened += self._happenings.of_processes(children)
        display.doing = {child.spec.name: self._starts.doing(child) for child in children}
        if status is not None:
            happened += self._happenings.of_status(status)
        for name, file in self._cursors.items():
            with suppress(OSError, ValueError):  # The tracker mends its own damaged file.
                cursor = file.read()
                if cursor is not None:
                    display.cursors[name] = cursor
                happened += self._happenings.of_tracker(name, cursor)
        for each in happened:
            display.tell(each, elapsed_s)
        for row in rows:
            if row["event"] == "eval":
                sample = await asyncio.to_thread(self._sample, row["batch"])
                if sample is not None:
                    display.tell_sample(sample, elapsed_s)

    def _new_rows(self, display: Display) -> list[Row]:
        rows: list[Row] = []
        with suppress(OSError):
            rows.extend(self._follower.rows())
        display.progress.take(rows)
        if not self._is_first:
            return rows
        # Rows from before this command was started are not news.
        self._is_first = False
        self._happenings.skip(rows)
        return []

    def _sample(self, batch: int) -> Sample | None:
        table = self._samples.evaluation(batch, SAMPLED)
        if table is None or not table.samples:
            return None
        self._shown += 1
        return table.samples[self._shown % len(table.samples)]
