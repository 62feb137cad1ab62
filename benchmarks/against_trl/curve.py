"""The measurements of a run, and what follows from them: plain values and arithmetic, without torch or TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Final, Literal

System = Literal["gspo", "trl"]

TARGET: Final = 0.85


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation on held-out tasks."""

    seconds: float
    """From the moment at which the first sample could be drawn to the evaluation's result."""
    samples: int
    """Samples that the evaluated weights were trained on."""
    evaluation_s: float
    """Part of ``seconds`` spent on evaluations, where nothing else ran meanwhile; else 0."""
    reward: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one system from one start model."""

    system: System
    setting: str
    """What the run changed in the common configuration."""
    seed: int
    points: tuple[Point, ...]
    """In order of time."""
    start_s: float
    """Seconds from the command until the first sample could be drawn."""
    batch_ends_s: tuple[float, ...]
    """When each batch was trained, on the clock of ``points``."""
    seconds: float
    """Seconds of all batches, evaluations included."""
    batch_parts: dict[str, float]
    """Seconds of a batch by activity; they add up to more in a system with simultaneous activities."""
    cpu_s: dict[str, float]
    """CPU seconds of a batch, by process, or by activity in a system with one process."""
    rates: dict[str, float]
    """Tokens per second, by activity."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Lengths of answers, and the share of padded rows that they fill."""
    learner_parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a batch from the learner's own profile, where it made one."""
    target: float = TARGET
    """The held-out reward that the run was to reach."""
    peak_mib: float = 0.0
    """The most memory of all its processes at once."""
    others_cores: float = 0.0
    """Cores that others used meanwhile, on average."""

    @property
    def batches(self) -> int:
        return len(self.batch_ends_s)

    def __str__(self) -> str:
        reached = arrival(self.points, self.target)
        target = "-" if reached is None else f"{reached.seconds:.1f} s, {reached.samples} samples"
        cpu_s = sum(self.cpu_s.values())
        return f"{self.seconds / self.batches:.2f} s a batch, {cpu_s:.2f} CPU s a batch, to {self.target}: {target}"


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """When a run's held-out reward first reached the target."""

    seconds: float
    seconds_without_evaluation: float
    samples: int


def arrival(points: Sequence[Point], target: float = TARGET) -> Arrival | None:
    """Return the first evaluation at or above ``target``; None when there is none."""
    for point in points:
        if point.reward >= target:
            return Arrival(
                seconds=point.seconds,
                seconds_without_evaluation=point.seconds - point.evaluation_s,
                samples=point.samples,
            )
    return None


def mean_reward(points: Sequence[Point], samples: int) -> float:
    """Return the mean held-out reward over the first ``samples`` samples: the area by trapezoids, over the width.

    Raises: ValueError for fewer than two evaluations there, or when the last lies before ``samples``.
    """
    inside = [point for point in points if point.samples <= samples]
    if len(inside) < 2 or inside[-1].samples != samples:
        ends = [point.samples for point in points]
        raise ValueError(f"samples is {samples}, evaluations are at {ends}: choose one of the later ones")
    area = sum((after.samples - before.samples) * (after.reward + before.reward) / 2 for before, after in pairwise(inside))
    return area / (samples - inside[0].samples)


def common_samples(runs: Sequence[Run]) -> int:
    """Return the largest number of samples at which all ``runs`` were evaluated; 0 when they share only the start."""
    shared = set.intersection(*({point.samples for point in run.points} for run in runs))
    return max(shared, default=0)


def mean_arrival_s(runs: Sequence[Run]) -> float:
    """Return the mean seconds to the target over seeds; infinite when a seed never reached it."""
    arrivals = [arrival(run.points, run.target) for run in runs]
    return fmean(math.inf if each is None else each.seconds for each in arrivals)


def best_setting(runs: Sequence[Run]) -> str:
    """Return the setting with the least mean seconds to the target; if none reached it, with the least per batch."""
    if not runs:
        raise ValueError("no runs: there is no best setting")
    settings = {run.setting: [each for each in runs if each.setting == run.setting] for run in runs}
    return min(
        settings,
        key=lambda name: (
            mean_arrival_s(settings[name]),
            median(run.seconds / run.batches for run in settings[name]),
        ),
    )
