"""One run on the page: each look opens its ledger anew, in the run's own thread."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from os import W_OK, access
from pathlib import Path
from typing import Final, TypeVar

from gspo_services.runs.expected import ExpectedAnswers
from gspo_services.runs.metrics import learning_watch
from gspo_services.runs.reading import OpenRun, open_run
from gspo_services.runs.view.completions import CompletionIndex, Completions
from gspo_services.runs.view.metric_columns import MetricColumns
from gspo_services.runs.view.overview import Curves
from gspo_services.runs.view.texts import Texts
from gspo_services.runs.view.timeline import ProcessHistory
from gspo_services.shared.runtime.clock import Clock

T = TypeVar("T")

COPY_S: Final = 60.0
"""Seconds for which a copy of a ledger on a read-only disk is used before it is copied again."""


class WatchedRun:
    """A run directory and what was read of it before. Its methods are called in one thread, one at a time (``call``)."""

    def __init__(self, name: str, directory: Path, clock: Clock) -> None:
        """``name`` stands for the run in addresses."""
        self.name = name
        self.directory = directory
        self.curves = Curves(lambda: learning_watch(directory))
        self.answers: tuple[tuple[str, ...], list[str]] = ((), [])
        """Some answers, and the findings for which they were read."""
        self.timeline = ProcessHistory(directory)
        self.texts = Texts(directory)
        self.metrics = MetricColumns()
        self.completions = Completions(CompletionIndex(directory), self.texts)
        self.expected: ExpectedAnswers | None = None
        """Used in a thread of its own (``call_aside``): reading all tasks may take long."""
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"view-{name}")
        self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"view-aside-{name}")
        self._kept = ExitStack()
        self._kept_run: OpenRun | None = None
        self._kept_until = 0.0

    @contextmanager
    def opened(self) -> Iterator[OpenRun]:
        """Open the run as it stands. Raises: NoLedger."""
        if access(self.directory, W_OK):
            with open_run(self.directory) as run:
                yield run
            return
        # SQLite cannot open an unmerged log where it cannot write beside it: the reader makes a copy, which may be large.
        if self._kept_run is None or self._clock.now() > self._kept_until:
            self._kept.close()
            self._kept_run = None
            self._kept_run = self._kept.enter_context(open_run(self.directory))
            self._kept_until = self._clock.now() + COPY_S
        yield self._kept_run

    async def call(self, look: Callable[[], T]) -> T:
        """Call ``look`` in the run's thread, after the calls before it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, look)

    async def call_aside(self, look: Callable[[], T]) -> T:
        """Call ``look`` in another thread, where it keeps no other look waiting."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, look)

    def close(self) -> None:
        self._aside.shutdown(wait=True, cancel_futures=True)
        self._thread.submit(self._kept.close)
        self._thread.shutdown(wait=True)


def watched_runs(directories: Sequence[Path], clock: Clock) -> dict[str, WatchedRun]:
    """Return the runs by name: the directory's own, with a number if two are alike."""
    found: dict[str, WatchedRun] = {}
    for directory in directories:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-.") or "run"
        name, number = plain, 2
        while name in found:
            name, number = f"{plain}-{number}", number + 1
        found[name] = WatchedRun(name, directory, clock)
    return found
