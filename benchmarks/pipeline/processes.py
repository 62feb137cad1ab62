"""Watches the processes of a run: how much processor each role has used, and whether each is on its cores."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from benchmarks.pipeline.measures import CpuSample

SAMPLE_S: Final = 0.1
LOOK_EVERY: Final = 50
"""The tree of processes is looked through anew every so many samples."""
MODULES: Final = {
    "services.broker": "broker",
    "services.learner": "learner",
    "services.runs.replay": "learner",
    "services.rollout": "agent",
}
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
SCHEDULER, SERVER = "scheduler", "server"


def now() -> float:
    """Wall-clock seconds, as in the records and logs of the processes."""
    return datetime.now(tz=UTC).timestamp()


class ProcessWatch:
    """Samples the descendants of this process. Roles: broker, learner, agent, scheduler (SGLang's, which runs the model)
    and server (the rest of SGLang).

    waits for:    the next sample
    unblocked by: time
    """

    def __init__(self) -> None:
        self.samples: list[CpuSample] = []
        self.strays: dict[str, str] = {}
        """Threads found on other cores than their role's, once each: where they may run."""
        self.num_threads = 0
        """Most threads seen that have cores of their own."""
        self._roles: dict[psutil.Process, str] = {}
        self._past: dict[str, float] = {}
        self._last: dict[psutil.Process, float] = {}

    async def run(self, cores: Mapping[str, frozenset[int]]) -> None:
        """Sample until cancelled. ``cores``: of the roles that have their own."""
        turn = 0
        while True:
            if turn % LOOK_EVERY == 0:
                self._look()
                self._check(cores)
            turn += 1
            self._sample()
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> None:
        for child in psutil.Process().children(recursive=True):
            # Anew for those that are known: SGLang's processes get their names some time after they are forked.
            with suppress(psutil.Error):
                role = role_of(child.cmdline(), self._roles.get(child.parent(), ""))
                if role:
                    self._roles[child] = role

    def _sample(self) -> None:
        running = set()
        for process in list(self._roles):
            try:
                used = process_use(Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                self._past[self._roles[process]] = self._past.get(self._roles[process], 0.0) + self._last.pop(process, 0.0)
                del self._roles[process]
                continue
            self._last[process] = used.cpu_s
            if used.runs:
                running.add(self._roles[process])
        seconds = dict(self._past)
        for process, cpu_s in self._last.items():
            seconds[self._roles[process]] = seconds.get(self._roles[process], 0.0) + cpu_s
        self.samples.append(CpuSample(time=now(), seconds=seconds, running=frozenset(running)))

    def _check(self, cores: Mapping[str, frozenset[int]]) -> None:
        num_threads = 0
        for process, role in self._roles.items():
            if role not in cores:
                continue
            with suppress(psutil.Error, OSError):
                for thread in process.threads():
                    found = os.sched_getaffinity(thread.id)
                    num_threads += 1
                    if not found <= cores[role]:
                        self.strays[f"{role} {thread.id}"] = f"{sorted(found)}, expected {sorted(cores[role])}"
        self.num_threads = max(self.num_threads, num_threads)


@dataclass(frozen=True, kw_only=True)
class Use:
    """What /proc says of one process."""

    runs: bool
    """Its first thread runs, or waits for a core."""
    cpu_s: float
    """Of all its threads, so far."""


def process_use(stat: str) -> Use:
    """From /proc/PID/stat, which costs a hundredth of what asking psutil costs. The name in it may hold anything."""
    words = stat.rpartition(")")[2].split()
    return Use(runs=words[0] == "R", cpu_s=(int(words[11]) + int(words[12])) / TICKS_PER_S)


def role_of(words: Sequence[str], parent_role: str) -> str:
    """From a process's command line; empty for one that is of no interest."""
    if words and words[0].startswith("sglang::scheduler"):
        return SCHEDULER
    if any("sglang" in word for word in words[:4]):
        return SERVER
    return next((role for module, role in MODULES.items() if module in words), parent_role)
