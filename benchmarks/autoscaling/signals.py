"""The scrapes of Prometheus, and the rules that derive from them the number of rollouts wanted.

A signal, like a rule, is a function of the scrapes, and sees nothing else of the simulation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.autoscaling.fleet import Fleet

SCRAPE_S: Final = 15.0
EVALUATE_S: Final = 15.0
"""The interval of the group of rules; the rule sees the scrape before it."""
EVALUATE_AFTER_S: Final = 10.0
SYNC_AFTER_S: Final = 14.0
"""The HPA reads the rule's newest result, 4 s old, from a scrape 10 s older; it reads again 15 s later."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """One scrape of all processes, summed as the rules do."""

    at: float
    wait_s: float
    """gspo_learner_wait_seconds_total."""
    serving: int
    """Rollouts with gspo_rollout_policy_version > 0."""
    running: int
    """Sum of gspo_rollout_episodes_running."""
    generating: int
    outstanding: int
    """gspo_broker_admission_groups."""
    lag: float
    """gspo_broker_lag_mean_versions; NaN before the first batch."""


@dataclass
class History:
    """Scrapes in their order."""

    max_lag: int
    max_running: int
    group_size: int
    scrapes: list[Scrape] = field(default_factory=list)

    def scrape(self, fleet: Fleet) -> None:
        self.scrapes.append(
            Scrape(
                at=fleet.now,
                wait_s=fleet.wait_s(),
                serving=fleet.num_serving,
                running=fleet.num_running,
                generating=fleet.num_generating,
                outstanding=fleet.ledger.num_outstanding,
                lag=fleet.batches[-1].mean_lag if fleet.batches else math.nan,
            )
        )

    def last(self, now: float, window_s: float) -> Sequence[Scrape]:
        """Return the scrapes of a range selector: after now - window_s, up to now."""
        return [scrape for scrape in self.scrapes[-int(window_s / SCRAPE_S) - 2 :] if now - window_s < scrape.at <= now]


Signal = Callable[[History, float], float | None]


def rate(samples: Sequence[tuple[float, float]], now: float, window_s: float) -> float | None:
    """Return PromQL's rate() of a counter without resets: extrapolated to the edges of the range where samples are close.

    ``samples`` (time, value) are those in the range. Source: promql/functions.go, extrapolatedRate, of Prometheus 2.42.
    None for fewer than two samples.
    """
    if len(samples) < 2:
        return None
    (first, low), (last, high) = samples[0], samples[-1]
    sampled_s = last - first
    between_s = sampled_s / (len(samples) - 1)
    to_start_s, to_end_s = first - (now - window_s), now - last
    if high > low and low >= 0:
        to_start_s = min(to_start_s, sampled_s * low / (high - low))
    covered_s = sampled_s
    for edge_s in (to_start_s, to_end_s):
        covered_s += edge_s if edge_s < 1.1 * between_s else between_s / 2
    return (high - low) * covered_s / sampled_s / window_s


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """gspo_rollouts_wanted: rollouts that have work, over the share of its time that the learner trains.

        wanted = headroom * mean busy rollouts / max(1 - waiting, 1 / most_factor)

    in these cases, and as many as serve in all others:
      out   the learner waits for more than ``out_wait`` of its time, and that gives more rollouts than serve
      in    mean lag passes ``in_lag`` of max_lag (complete groups wait), and that gives fewer
    """

    window_s: float = 600.0
    out_wait: float = 0.05
    in_lag: float = 0.75
    most_factor: float = 8.0
    headroom: float = 1.1

    def __call__(self, history: History, now: float) -> float | None:
        scrapes = history.last(now, self.window_s)
        waiting = rate([(scrape.at, scrape.wait_s) for scrape in scrapes], now, self.window_s)
        if waiting is None or not scrapes[-1].serving:
            return None
        serving = scrapes[-1].serving
        busy = sum(scrape.running for scrape in scrapes) / len(scrapes) / history.max_running
        wanted = self.headroom * busy / max(1 - waiting, 1 / self.most_factor)
        if waiting > self.out_wait and wanted > serving:
            return wanted
        if scrapes[-1].lag > self.in_lag * history.max_lag and wanted < serving:
            return wanted
        return float(serving)


@dataclass(frozen=True, kw_only=True)
class WaitAndLag:
    """The rule that ignores how busy rollouts are: it has only waiting and lag.

    Out by 1 / (1 - waiting), in by a fifth when the learner hardly waits and lag is near its bound.
    """

    window_s: float = 300.0
    out_wait: float = 0.1
    in_wait: float = 0.02
    in_lag: float = 0.75
    most_factor: float = 2.0

    def __call__(self, history: History, now: float) -> float | None:
        scrapes = history.last(now, self.window_s)
        waiting = rate([(scrape.at, scrape.wait_s) for scrape in scrapes], now, self.window_s)
        if waiting is None or not scrapes[-1].serving:
            return None
        serving = scrapes[-1].serving
        if waiting > self.out_wait:
            return float(math.ceil(serving / max(1 - waiting, 1 / self.most_factor)))
        if waiting < self.in_wait and scrapes[-1].lag > self.in_lag * history.max_lag:
            return float(math.floor(0.8 * serving))
        return float(serving)


def utilisation(history: History, now: float) -> float | None:
    """GPU utilisation against a target of 80 %: a GPU that generates anything is busy."""
    scrapes = history.last(now, 60.0)
    return sum(scrape.generating for scrape in scrapes) / len(scrapes) / 0.8 if scrapes else None


def queue_length(history: History, now: float) -> float | None:
    """Admitted work, against a target of three quarters of what one rollout can have in flight."""
    scrapes = history.last(now, 60.0)
    if not scrapes:
        return None
    trajectories = sum(scrape.outstanding for scrape in scrapes) / len(scrapes) * history.group_size
    return trajectories / (0.75 * history.max_running)
