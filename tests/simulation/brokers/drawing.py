"""What a seed makes of several brokers: how many, which of them the weather strikes, and weather that only they can have."""

import random
from dataclasses import replace

from tests.simulation.plan import STANDBY, Event, Plan, Point, broker_name

SHARE_ALONE = 0.5
"""Of the seeds that may have several brokers: those that have one. With the others, three of five seeds have one."""
MOST_BATCHES = 4
BETWEEN: tuple[Point, ...] = (
    "publication received", "report received", "checkpoint received", "welcomed", "batch sent", "part sent", "committed",
)  # fmt: skip
"""Moments at which one broker has something that another does not have yet."""


def num_brokers_of(seed: int, *, may_be_several: bool) -> int:
    """How many brokers the seed's run has."""
    rng = random.Random(f"brokers {seed}")
    return 1 if not may_be_several or rng.random() < SHARE_ALONE else rng.randint(2, 4)


def with_brokers(plan: Plan, num_brokers: int, rollouts: list[str], storm_s: float) -> Plan:
    """The plan, with its events, for several brokers."""
    rng = random.Random(f"several brokers {plan.seed}")
    names = [broker_name(number) for number in range(num_brokers)]
    events = [_struck(rng, event, names) for event in plan.events]
    events += [_between(rng, names, storm_s) for _ in range(rng.randint(1, 4))]
    events += [_apart(rng, names, rollouts, storm_s) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.2:
        events += _two_learners(rng, names, storm_s)
    if rng.random() < 0.15:
        # Late, so that most of the weather has a run that goes on.
        events.append(Event(at=rng.uniform(0.5, 1.2) * storm_s, kind="stop", target=(rng.choice(names),)))
    return replace(
        plan,
        num_brokers=num_brokers,
        # Each broker's share has few groups, so that a run of four takes little longer than one of a single broker.
        num_batches=min(plan.num_batches, MOST_BATCHES),
        groups_per_batch=num_brokers * rng.choice([1, 1, 2] if num_brokers < 4 else [1]),
        max_running=plan.max_running + num_brokers,
        num_tasks=None if plan.num_tasks is None else plan.num_tasks + num_brokers,
        events=tuple(sorted(events, key=lambda event: event.at)),
    )


def _struck(rng: random.Random, event: Event, names: list[str]) -> Event:
    """The event, as it strikes one of the brokers."""
    if event.kind == "poison":
        return replace(event, target=(*event.target, rng.choice(names)))
    return replace(event, target=tuple(rng.choice(names) if name == "broker" else name for name in event.target))


def _between(rng: random.Random, names: list[str], storm_s: float) -> Event:
    """A broker, or the learner, dies when one broker has something and the others do not have it yet."""
    return Event(
        at=rng.uniform(0.0, storm_s),
        kind="kill_when",
        target=(rng.choice([*names, "learner"]),),
        seconds=rng.uniform(0.2, 4.0),
        amount=rng.choice([0.0, 0.0, 0.001, 0.005]),
        point=rng.choice(BETWEEN),
    )


def _apart(rng: random.Random, names: list[str], rollouts: list[str], storm_s: float) -> Event:
    """One broker is away for a while, for all or for one of the others."""
    at, name, seconds = rng.uniform(0.0, storm_s), rng.choice(names), rng.uniform(1.0, 12.0)
    match rng.choice(["partition", "partition", "suspend", "kill", "slow", "disk_full", "half_open"]):
        case "partition":
            return Event(at=at, kind="partition", target=(rng.choice(["learner", *rollouts]), name), seconds=seconds)
        case "half_open":
            return Event(at=at, kind="half_open", target=(rng.choice(["learner", *rollouts]), name))
        case "slow":
            return Event(at=at, kind="slow", target=(name,), seconds=seconds, amount=rng.uniform(0.3, 2.0))
        case "suspend":
            return Event(at=at, kind="suspend", target=(name,), seconds=seconds)
        case "kill":
            return Event(at=at, kind="kill", target=(name,), seconds=seconds)
    return Event(at=at, kind="disk_full", target=(name,), seconds=min(seconds, 6.0))


def _two_learners(rng: random.Random, names: list[str], storm_s: float) -> list[Event]:
    """A second learner waits while the first is cut off from some of the brokers for longer than a learner may be silent."""
    at = rng.uniform(0.0, 0.7 * storm_s)
    away = rng.sample(names, rng.randint(1, len(names)))
    return [
        Event(at=max(0.0, at - 1.0), kind="second_learner", target=(STANDBY,)),
        *(Event(at=at, kind="partition", target=("learner", name), seconds=rng.uniform(8.0, 16.0)) for name in away),
    ]
