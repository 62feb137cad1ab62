"""Steps that take turns, and their cost: CPU seconds and wall clock, medians over rounds, ratios within a round."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.learner_step.steps import Step


@dataclass(frozen=True)
class Cost:
    """One kind of step, with a number per round."""

    cpu_s: list[float]
    wall_s: list[float]


def take_turns(steps: Mapping[str, Step], rounds: int, *, limit_s: float = math.inf) -> dict[str, Cost]:
    """Make every step once per round, in alternating order, after one round to warm up.

    No round begins later than ``limit_s`` after the start, but at least one counts.
    """
    begin = time.perf_counter()
    costs = {name: Cost([], []) for name in steps}
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - begin > limit_s:
            break
        for name in steps if number % 2 else reversed(list(steps)):
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            if number > 0:
                costs[name].cpu_s.append(time.process_time() - cpu)
                costs[name].wall_s.append(time.perf_counter() - wall)
    return costs


def speed_ratio(ours: Cost, theirs: Cost) -> dict[str, float]:
    """Return the ratio of tokens per CPU second: median over rounds, quartiles; and the median by wall clock."""
    ratios = [b / a for a, b in zip(ours.cpu_s, theirs.cpu_s, strict=True)]
    wall = [b / a for a, b in zip(ours.wall_s, theirs.wall_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"ratio": middle, "low": low, "high": high, "wall_ratio": statistics.median(wall)}


def summary(cost: Cost, num_tokens: int) -> dict[str, Any]:
    """Return medians, and real tokens per second of each clock."""
    cpu_s, wall_s = statistics.median(cost.cpu_s), statistics.median(cost.wall_s)
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "tokens_per_cpu_s": num_tokens / cpu_s,
        "tokens_per_s": num_tokens / wall_s,
    } | {"rounds": asdict(cost)}
