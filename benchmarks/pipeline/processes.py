"""Watch the processes of a run: the CPU time of each role, and whether each is on its cores."""

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
"""Samples between two searches of the process tree."""
MODULES: Final = {
    "gspo_services.broker": "broker",
    "gspo_services.learner": "learner",
    "gspo_services.runs.replay": "learner",
    "gspo_services.rollout": "agent",
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
        """Threads that may run on other cores than their role's, once each, with those cores."""
        self.num_threads = 0
        """Most threads seen with assigned cores."""
        self._roles: dict[psutil.Process, str] = {}
        self._past: dict[str, float] = {}
        self._last: dict[psutil.Process, float] = {}

    async def run(self, cores: Mapping[str, frozenset[int]]) -> None:
        """Sample until cancelled. ``cores``: those of the roles with assigned cores."""
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
            # Known processes are read again: SGLang's processes get their names some time after the fork.
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
    """The state of one process in /proc."""

    runs: bool
    """Whether its first thread runs, or waits for a core."""
    cpu_s: float
    """CPU seconds of all its threads so far."""


def process_use(stat: str) -> Use:
    """Read /proc/PID/stat, at a hundredth of the cost of psutil. The name in it may hold any character."""
    words = stat.rpartition(")")[2].split()
    return Use(runs=words[0] == "R", cpu_s=(int(words[11]) + int(words[12])) / TICKS_PER_S)


def role_of(words: Sequence[str], parent_role: str) -> str:
    """Return the role from a process's command line; empty for other processes."""
    if words and words[0].startswith("sglang::scheduler"):
        return SCHEDULER
    if any("sglang" in word for word in words[:4]):
        return SERVER
    return next((role for module, role in MODULES.items() if module in words), parent_role)
