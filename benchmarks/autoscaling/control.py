"""A fleet under an autoscaler: scrapes, rule evaluations and the HPA's syncs at their own intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.autoscaling.config import Config
from benchmarks.autoscaling.fleet import BatchRecord, Fleet
from benchmarks.autoscaling.hpa import SYNC_S, Autoscaler, Behavior
from benchmarks.autoscaling.signals import EVALUATE_AFTER_S, EVALUATE_S, SCRAPE_S, SYNC_AFTER_S, History, Scrape, Signal


@dataclass(frozen=True, kw_only=True)
class Run:
    """The record of a simulated run: one sample per scrape, one entry per batch."""

    config: Config
    duration_s: float
    scrapes: Sequence[Scrape]
    replicas: Sequence[tuple[float, int]]
    """Time and number of pods after each sync."""
    batches: Sequence[BatchRecord]
    pod_s: Sequence[float]
    """Pod seconds until each scrape."""
    num_lost: int
    tokens_lost: float


class _Control:
    def __init__(self, fleet: Fleet, signal: Signal, behavior: Behavior) -> None:
        config = fleet.config
        self.fleet, self.signal, self.autoscaler = fleet, signal, Autoscaler(behavior)
        self.history = History(config.max_lag, config.max_running, config.group_size)
        self.pod_s: list[float] = []
        self.replicas: list[tuple[float, int]] = [(0.0, fleet.replicas)]
        self.metric: float | None = None
        fleet.at(0.0, self._scrape)
        fleet.at(EVALUATE_AFTER_S, self._evaluate)
        fleet.at(SYNC_AFTER_S, self._sync)

    def _scrape(self) -> None:
        self.history.scrape(self.fleet)
        self.pod_s.append(self.fleet.pod_s())
        self.fleet.at(self.fleet.now + SCRAPE_S, self._scrape)

    def _evaluate(self) -> None:
        self.metric = self.signal(self.history, self.fleet.now)
        self.fleet.at(self.fleet.now + EVALUATE_S, self._evaluate)

    def _sync(self) -> None:
        replicas = self.autoscaler.sync(self.fleet.now, self.metric, self.fleet.replicas)
        if replicas != self.fleet.replicas:
            self.fleet.scale(replicas)
        self.replicas.append((self.fleet.now, replicas))
        self.fleet.at(self.fleet.now + SYNC_S, self._sync)


def simulate(config: Config, *, signal: Signal, behavior: Behavior, replicas: int, duration_s: float, seed: int) -> Run:
    """Simulate a run that begins with ``replicas`` pods."""
    fleet = Fleet(config, replicas=replicas, seed=seed)
    control = _Control(fleet, signal, behavior)
    fleet.run_until(duration_s)
    return Run(
        config=config,
        duration_s=duration_s,
        scrapes=control.history.scrapes,
        replicas=control.replicas,
        batches=fleet.batches,
        pod_s=control.pod_s,
        num_lost=fleet.num_lost,
        tokens_lost=fleet.tokens_lost,
    )


@dataclass(frozen=True)
class AsManyAs:
    """The signal of a fixed fleet."""

    replicas: int

    def __call__(self, _history: History, _now: float) -> float:
        return float(self.replicas)
