"""What a run's processes cost while it goes on, and what others used of the machine meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

from benchmarks.random_kills.memory import role_of

SAMPLE_S: Final = 1.0
BUSY_CORES: Final = 0.1
"""Cores that others use, on average, from which a machine counts as busy: seconds then say nothing, ratios something."""


def busy_s() -> float:
    """CPU seconds that all processes of the machine but this one have used so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq) - time.process_time()


@dataclass
class Watch:
    """CPU seconds by role, memory and the machine's other work, sampled now and then."""

    looks: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Batches trained and CPU seconds so far; a process that ended keeps what it had when last seen."""
    peak_mib: float = 0.0
    """The most memory of all processes at once; a page that several share counts once."""
    _known: dict[psutil.Process, tuple[str, float]] = field(default_factory=dict)
    _begin: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), busy_s()))
    _used_s: float = 0.0

    def look(self, root: psutil.Process, batches: int, *, memory: bool = True) -> None:
        """Sample the process and those that it started. ``memory``: which takes some time."""
        mib = 0.0
        for process in [root, *root.children(recursive=True)]:
            if process.pid == os.getpid():
                continue  # ``busy_s`` has nothing of it either.
            try:
                name, times = role_of(" ".join(process.cmdline())), process.cpu_times()
                mib += process.memory_full_info().pss / 2**20 if memory else 0.0
            except psutil.Error:
                continue
            # A process that has just ended has no command line any more: its last values stay.
            self._known[process] = (name or "other", times.user + times.system)
        self.peak_mib = max(self.peak_mib, mib)
        used: dict[str, float] = {}
        for name, seconds in self._known.values():
            used[name] = used.get(name, 0.0) + seconds
        self._used_s = sum(used.values())
        self.looks.append((batches, used))

    def others_cores(self) -> float:
        """Cores that neither the run nor this process used, on average, from the start to now."""
        begin, busy = self._begin
        return max(0.0, busy_s() - busy - self._used_s) / (time.monotonic() - begin)

    def cpu_s_of_a_batch(self) -> dict[str, float]:
        """Return CPU seconds per batch, from the first batch's end to the last one's; empty without two samples."""
        trained = [look for look in self.looks if look[0] >= 1]
        if not trained or trained[-1][0] == trained[0][0]:
            return {}
        first, before = trained[0]
        # Not the last sample: by then processes write reports and end.
        last, after = next(look for look in trained if look[0] == trained[-1][0])
        return {name: (after[name] - before.get(name, 0.0)) / (last - first) for name in sorted(after)}


@contextmanager
def watched(every_s: float = SAMPLE_S) -> Iterator[Watch]:
    """Sample what this process starts while the block is at work; afterwards ``others_cores`` is what others used."""
    watch, ended = Watch(), threading.Event()

    def sample() -> None:
        while not ended.wait(every_s):
            watch.look(psutil.Process(), 0, memory=False)

    thread = threading.Thread(target=sample, name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()


def said_of(others_cores: float) -> str:
    """Return what a report says of a busy machine; nothing of one that is not."""
    if others_cores < BUSY_CORES:
        return ""
    return (
        f"The machine was busy: others used {others_cores:.1f} of its cores, so only ratios are shown. "
        "Run it with nothing else for seconds."
    )
