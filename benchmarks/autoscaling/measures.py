"""The outcome of a run."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.autoscaling.control import Run
from benchmarks.autoscaling.signals import SCRAPE_S

WINDOW_S = 900.0
"""A run is settled when the learner's wait over this time is below ``SETTLED_WAIT``."""
SETTLED_WAIT = 0.05


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of the run's last part unless stated otherwise."""

    settle_min: float
    """Minutes from the start until the first quarter of an hour in which the learner waits less than 5 %; inf: never."""
    waiting: float
    lag_used: float
    """Mean lag over max_lag."""
    pods: float
    spread: float
    """Ninth minus first decile of the number of pods, divided by its mean."""
    overshoot: float
    """Most pods of the whole run, divided by the mean of its last part."""
    turns_per_hour: float
    """Changes of direction: an addition after a removal, or the other way round."""
    batches_per_hour: float
    pod_hours_per_batch: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case over all seeds."""

    name: str
    fluid_size: float
    outcomes: tuple[Outcome, ...]

    def quartiles(self, field: str) -> tuple[float, float, float]:
        """Return the quartiles over seeds, with both ends counted."""
        values = sorted(getattr(outcome, field) for outcome in self.outcomes)
        return _at(values, 0.25), _at(values, 0.5), _at(values, 0.75)


def _at(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return high if math.isinf(high) and place % 1 else low + (high - low) * (place % 1) if high != low else low


def outcome(run: Run, last_s: float) -> Outcome:
    """Measure a run over its last ``last_s`` seconds."""
    begin = run.duration_s - last_s
    pods = [replicas for at, replicas in run.replicas if at >= begin]
    batches = [batch for batch in run.batches if batch.at >= begin]
    first = math.ceil(begin / SCRAPE_S)
    scrapes = run.scrapes[first:]
    elapsed = scrapes[-1].at - scrapes[0].at
    mean = statistics.fmean(pods)
    pods_sorted = sorted(pods)
    return Outcome(
        settle_min=_settled_at(run) / 60,
        waiting=(scrapes[-1].wait_s - scrapes[0].wait_s) / elapsed,
        lag_used=statistics.fmean(batch.mean_lag for batch in batches) / run.config.max_lag if batches else math.nan,
        pods=mean,
        spread=(pods_sorted[int(0.9 * (len(pods) - 1))] - pods_sorted[int(0.1 * (len(pods) - 1))]) / mean,
        overshoot=max(replicas for _, replicas in run.replicas) / mean,
        turns_per_hour=_turns([replicas for at, replicas in run.replicas if at >= begin]) / (last_s / 3600),
        batches_per_hour=len(batches) / (last_s / 3600),
        pod_hours_per_batch=(run.pod_s[-1] - run.pod_s[first]) / 3600 / len(batches) if batches else math.inf,
    )


def _settled_at(run: Run) -> float:
    step = round(WINDOW_S / SCRAPE_S)
    for begin, end in zip(run.scrapes, run.scrapes[step:], strict=False):
        if (end.wait_s - begin.wait_s) / (end.at - begin.at) < SETTLED_WAIT:
            return begin.at
    return math.inf


def _turns(pods: Sequence[int]) -> int:
    signs = [later > earlier for earlier, later in pairwise(pods) if later != earlier]
    return sum(before != after for before, after in pairwise(signs))
