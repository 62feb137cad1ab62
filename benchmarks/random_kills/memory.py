"""Memory of every process of a run over time: its role, its lifetime, and its growth per minute."""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import matplotlib
import psutil

from benchmarks.markdown import table

matplotlib.use("Agg")
from matplotlib import pyplot

LEAST_S: Final = 60.0
"""Growth per minute is measured over the second half of a life of at least this length: a start is no leak."""
ROLES: Final = (
    "gspo run", "broker", "learner", "rollout", "agent", "reward", "reward model", "sandbox server", "sandbox", "sglang",
    "scheduler", "detokenizer",
)  # fmt: skip
"""An agent is a worker process of users' agents, a sandbox one of bubblewrap with its init."""


@dataclass
class Life:
    """One process: ``times`` (seconds since the start of the run) and ``bytes`` that belong to it alone (USS)."""

    role: str
    process: psutil.Process
    times: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float | None:
        """Bytes per minute: median slope over the second half of its life; None for a life that was too short."""
        middle = (self.times[0] + self.times[-1]) / 2
        warm = [(time, size) for time, size in zip(self.times, self.bytes, strict=True) if time >= middle]
        if len(warm) < 2 or warm[-1][0] - warm[0][0] < LEAST_S:
            return None
        half = len(warm) // 2
        pairs = zip(warm[:half], warm[-half:], strict=True)
        return 60 * statistics.median((size - first) / (time - begin) for (begin, first), (time, size) in pairs)


class Watch:
    """All processes below ``root``, including those that have ended."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self.lives: dict[psutil.Process, Life] = {}

    def sample(self, time_s: float) -> None:
        """Sample all running processes once."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                life = self.lives.get(process) or Life(role_of(" ".join(process.cmdline())), process)
                size = process.memory_full_info().uss
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if not life.role:
                continue
            self.lives[process] = life
            life.times.append(time_s)
            life.bytes.append(size)

    def leftovers(self) -> list[str]:
        """Return processes of the run that are still alive."""
        return [f"{life.role} (pid {process.pid})" for process, life in self.lives.items() if process.is_running()]


def role_of(command: str) -> str:
    """Return the role in the run of the process with this command line; empty between fork and exec, and for passers-by."""
    for pattern, name in (
        (r"gspo_sandbox_init", "sandbox"),
        (r"gspo_services\.(cli\.main sandbox|tasks\.sandbox\.server)", "sandbox server"),
        (r"services/tasks/worker/main\.py", "agent"),
        (r"gspo_services\.tasks\.reward_worker", "reward"),
        (r"gspo_services\.tasks\.reward_model", "reward model"),
        (r"sglang::scheduler", "scheduler"),
        (r"sglang::detok", "detokenizer"),
        (r"sglang", "sglang"),
        (r"gspo_services\.broker", "broker"),
        (r"gspo_services\.learner", "learner"),
        (r"gspo_services\.rollout", "rollout"),
        (r"gspo_services\.cli\.main", "gspo run"),
    ):
        if re.search(pattern, command):
            return name
    return ""


def growth_table(lives: Iterable[Life]) -> str:
    """Return Markdown: growth per minute of each role's processes that lived long enough."""
    rows: list[tuple[object, ...]] = []
    every = list(lives)
    for name in ROLES:
        ours = [life for life in every if life.role == name]
        grown = [(life, life.growth) for life in ours if life.growth is not None]
        if not ours:
            continue
        rates = [rate / 2**20 for _, rate in grown if rate is not None]
        minutes = sum(life.times[-1] - life.times[0] for life, _ in grown) / 120
        size = statistics.median(life.bytes[-1] for life in ours) / 2**20
        rate = (f"{statistics.median(rates):+.3f}", f"{max(rates):+.3f}") if rates else ("-", "-")
        rows.append((name, len(ours), len(grown), f"{minutes:.0f}", f"{size:.0f}", *rate))
    growing = ["minutes measured", "MiB, median", "MiB a minute: median", "largest"]
    return table(["process", "lives", "of them measured", *growing], rows)


def plot(lives: Iterable[Life], kills: Iterable[float], path: Path) -> None:
    """Plot one panel per role: every process is a line, every kill a mark on the time axis."""
    every, marks = list(lives), list(kills)
    shown = [name for name in ROLES if any(life.role == name for life in every)]
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(9, 1.7 * len(shown)), sharex=True, layout="constrained")
    for axes, name in zip(panels, shown, strict=True):
        for life in every:
            if life.role == name:
                axes.plot([time / 60 for time in life.times], [size / 2**20 for size in life.bytes], linewidth=1)
        axes.plot([mark / 60 for mark in marks], [0] * len(marks), "|", color="black", markersize=8, clip_on=False)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{name}\nMiB")
    panels[-1].set_xlabel("minutes; a mark is a kill")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
