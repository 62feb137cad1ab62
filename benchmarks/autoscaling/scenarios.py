"""The simulated cases: jobs and weathers, signals, and one change at a time of the chosen rule."""

from dataclasses import dataclass, replace
from typing import Final

from benchmarks.autoscaling.config import Config, Lengths, Spot
from benchmarks.autoscaling.control import AsManyAs, Run, simulate
from benchmarks.autoscaling.hpa import Behavior, deployed
from benchmarks.autoscaling.measures import Outcome, outcome
from benchmarks.autoscaling.signals import Signal, WaitAndLag, Wanted, queue_length, utilisation

MOST: Final = 64
"""Upper bound of the simulated autoscalers: nearly four times what the base job needs."""
BASE: Final = Config()
TAIL: Final = Lengths(tail_share=0.02, most=16384)
LOST_AT_S: Final = 5400.0
JOBS: Final = {
    "base": BASE,
    "max_lag 2": replace(BASE, max_lag=2),
    "max_lag 8": replace(BASE, max_lag=8),
    "2 % of episodes 10x as long": replace(BASE, lengths=TAIL),
    "2 % 10x as long, max_lag 16": replace(BASE, lengths=TAIL, max_lag=16),
    "Pareto lengths (1.5)": replace(BASE, lengths=Lengths(pareto=1.5, most=16384), max_lag=16),
    "steps of 10 minutes": replace(BASE, step_s=600.0, lengths=Lengths(mean=8000.0, most=32768)),
    "spot: 5 % lost per hour": replace(BASE, spot=Spot(per_hour=0.05)),
    "spot: half at once": replace(BASE, spot=Spot(mass_at_s=LOST_AT_S, mass_share=0.5)),
    "four times the room (max_running)": replace(BASE, max_running=32),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table: a job under a signal and a behaviour, from ``replicas`` pods."""

    name: str
    config: Config
    signal: Signal
    behavior: Behavior
    replicas: int = 1
    hours: float = 3.0

    def run(self, seed: int) -> Run:
        return simulate(
            self.config,
            signal=self.signal,
            behavior=self.behavior,
            replicas=self.replicas,
            duration_s=self.hours * 3600,
            seed=seed,
        )

    def outcome(self, seed: int) -> Outcome:
        """Simulate, and measure the second half of the run."""
        return outcome(self.run(seed), self.hours * 1800)


def _fixed(name: str, config: Config, replicas: int) -> Case:
    behavior = Behavior(max_replicas=1024)
    return Case(name=name, config=config, signal=AsManyAs(replicas), behavior=behavior, replicas=replicas)


def jobs() -> list[Case]:
    """Return the chosen rule in all jobs and weathers."""
    return [
        Case(
            name=name,
            config=config,
            signal=Wanted(),
            behavior=deployed(MOST),
            hours=8.0 if config.step_s > 300 else 3.0,
        )
        for name, config in JOBS.items()
    ]


def compared(config: Config) -> list[Case]:
    """Return the chosen rule, other signals under the same behaviour, and fixed fleets."""
    size = round(config.fluid_size())
    behavior = deployed(MOST)
    others: dict[str, Signal] = {
        "busy rollouts / training share": Wanted(),
        "wait and lag alone": WaitAndLag(),
        "GPU utilisation, 80 %": utilisation,
        "queue of admitted work": queue_length,
    }
    cases = [Case(name=name, config=config, signal=signal, behavior=behavior) for name, signal in others.items()]
    fixed = {"half of the fluid size": size // 2, "the fluid size": size, "twice that": 2 * size}
    return cases + [_fixed(f"fixed: {name}, {replicas}", config, replicas) for name, replicas in fixed.items()]


def sensitivity() -> list[Case]:
    """Return cases with one change each."""
    behavior = deployed(MOST)
    signals = {
        "as deployed": Wanted(),
        "window 2 min": Wanted(window_s=120.0),
        "window 5 min": Wanted(window_s=300.0),
        "window 20 min": Wanted(window_s=1200.0),
        "headroom 1.0": Wanted(headroom=1.0),
        "headroom 1.25": Wanted(headroom=1.25),
        "out from 2 % of waiting": Wanted(out_wait=0.02),
        "out from 15 % of waiting": Wanted(out_wait=0.15),
        "in from half of max_lag": Wanted(in_lag=0.5),
        "in from 0.9 of max_lag": Wanted(in_lag=0.9),
        "at most twofold at once": Wanted(most_factor=2.0),
    }
    percent, pods = behavior.out.policies
    behaviors = {
        "out: Kubernetes' own rules": replace(behavior, out=Behavior().out),
        "out: no stabilisation": replace(behavior, out=replace(behavior.out, stabilization_s=0)),
        "out: fourfold in 5 min": replace(behavior, out=replace(behavior.out, policies=(replace(percent, value=300), pods))),
        "in: Kubernetes' own rules": replace(behavior, back=Behavior().back),
        "in: stabilised for 30 min": replace(behavior, back=replace(behavior.back, stabilization_s=1800)),
        "both: Kubernetes' own rules": Behavior(max_replicas=MOST),
    }
    cases = [Case(name=name, config=BASE, signal=signal, behavior=behavior) for name, signal in signals.items()]
    return cases + [Case(name=name, config=BASE, signal=Wanted(), behavior=rules) for name, rules in behaviors.items()]
