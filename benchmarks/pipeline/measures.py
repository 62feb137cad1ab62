"""Figures from records: rates by batch, their medians and spread, CPU use by role; pure functions."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainedBatch:
    """One batch of a run, or of the learner alone."""

    index: int
    time: float
    """When it was trained and its weights were published, in seconds of any clock."""
    action_tokens: int


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    low: float
    """First quartile; the smallest value where there are fewer than four."""
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class CpuSample:
    """CPU seconds that each role has used up to a moment, and the roles that run or wait for a core."""

    time: float
    seconds: Mapping[str, float]
    running: frozenset[str] = frozenset()


def spread(values: Sequence[float]) -> Spread:
    """Summarise values. Raises: ValueError without any."""
    if not values:
        raise ValueError("nothing was measured: measure more batches than are left out at both ends")
    if len(values) < 4:
        return Spread(median=median(values), low=min(values), high=max(values), count=len(values))
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median=median(values), low=low, high=high, count=len(values))


def trained_batches(rows: Sequence[Mapping[str, Any]]) -> list[TrainedBatch]:
    """Read the "batch" lines of a run's metrics.jsonl, which have wall-clock times."""
    return [
        TrainedBatch(index=int(row["batch"]), time=float(row["time"]), action_tokens=int(row["num_action_tokens"]))
        for row in rows
    ]


def steady(batches: Sequence[TrainedBatch], *, first: int, last: int) -> list[TrainedBatch]:
    """Return the batches without the ``first`` ones, in which queues fill, and the ``last`` ones.

    After the last ones nothing more is generated. The first remaining batch serves only as a starting line.

    Raises: ValueError when fewer than two remain.
    """
    remaining = list(batches[max(0, first - 1) : len(batches) - last])
    if len(remaining) < 2:
        raise ValueError(f"{len(batches)} batches, of which {first} and {last} are left out: run more of them")
    return remaining


def rates(batches: Sequence[TrainedBatch]) -> list[float]:
    """Return action tokens per second of each batch but the first, from the end of the one before to its own."""
    return [after.action_tokens / (after.time - before.time) for before, after in pairwise(batches)]


def overall_rate(batches: Sequence[TrainedBatch]) -> float:
    """Return action tokens per second of all batches but the first together."""
    return sum(batch.action_tokens for batch in batches[1:]) / (batches[-1].time - batches[0].time)


def seconds_per_batch(batches: Sequence[TrainedBatch]) -> list[float]:
    return [after.time - before.time for before, after in pairwise(batches)]


def cpu_shares(samples: Sequence[CpuSample], begin: float, end: float) -> dict[str, float]:
    """Return the average cores that each role used between two moments. Raises: ValueError for moments out of order."""
    if not begin < end:
        raise ValueError(f"begin is {begin} and end is {end}: it must come before")
    before, after = _sample_at(samples, begin), _sample_at(samples, end)
    passed = after.time - before.time
    if passed <= 0:
        return {}
    roles = sorted({*before.seconds, *after.seconds})
    return {role: (after.seconds.get(role, 0.0) - before.seconds.get(role, 0.0)) / passed for role in roles}


def cpu_seconds(samples: Sequence[CpuSample], begin: float, end: float, roles: Sequence[str]) -> float:
    """Return the CPU seconds of some roles between two moments."""
    shares = cpu_shares(samples, begin, end)
    return sum(shares.get(role, 0.0) for role in roles) * (end - begin)


def even_prompt(*, rollout_s: float, learner_s: float, action_tokens: float, target: float) -> float:
    """Return the prompt tokens that make training an episode of ``action_tokens`` ``target`` times as long as generating it.

    ``rollout_s``: CPU seconds for an action token; ``learner_s``: for any token, prompts included. The cost of a longer
    prompt in generation is left out: it is computed once for a whole group.
    """
    return max(0.0, action_tokens * (target * rollout_s / learner_s - 1))


def _sample_at(samples: Sequence[CpuSample], time: float) -> CpuSample:
    """Return the last sample that is not later than ``time``, or the first one."""
    return samples[max(0, bisect_right(samples, time, key=lambda sample: sample.time) - 1)]


def token_rate(arrivals: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Return tokens per second among (time, number) between two moments; NaN for an empty span."""
    if end <= begin:
        return math.nan
    return sum(number for time, number in arrivals if begin < time <= end) / (end - begin)


def waves(answered: Sequence[float], size: int, begin: float, end: float) -> list[float]:
    """Return every ``size``-th answer time between two moments.

    Requests that began together end together: only the intervals between these times hold equal amounts of work.
    """
    return [time for time in answered[size - 1 :: size] if begin <= time <= end]
