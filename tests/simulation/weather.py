"""What happens to a run, drawn from a seed: the run's own settings, and a list of events that can be shortened."""

import random
from dataclasses import replace

from tests.simulation.plan import STANDBY, Event, Kind, Plan, Point

POINTS: dict[Point, tuple[str, ...]] = {
    "chunk received": ("broker", "rollout"),
    "committed": ("broker",),
    "acknowledged": ("broker", "rollout"),
    "lease sent": ("broker", "rollout"),
    "batch sent": ("broker", "learner"),
    "publishing": ("learner", "broker"),
    "saving": ("learner", "broker"),
    "loading": ("rollout", "learner"),
}
"""Moments at which a crash is worst, and the processes that it may hit; "batch failed" only where there is poison, and
those of archiving only where tokens are archived."""
LONGEST_STORM_S = 24.0

ACCEPTED_LOSS = "accepted loss"
DAMAGES = ("old copy", "row", "old mark", ACCEPTED_LOSS)
"""An old copy of the ledger or of its mark is put back, or a row is changed. An event's ``amount`` is the place here.

When the broker refuses it, a person puts the whole files back; an accepted loss is an old copy from which a person goes on.
"""
LOSS_AMOUNT = float(DAMAGES.index(ACCEPTED_LOSS))


def plan_of(seed: int, *, may_have_agents: bool = True, may_be_stopped: bool = True) -> Plan:
    """The run of a seed."""
    rng = random.Random(f"plan {seed}")
    num_rollouts = rng.randint(1, 3)
    plan = Plan(
        seed=seed,
        num_batches=rng.randint(3, 6),
        group_size=2,
        groups_per_batch=rng.randint(1, 3),
        max_lag=rng.choice([0, 1, 1, 2, 3]),
        checkpoint_every_batches=rng.randint(1, 3),
        evaluate_every_batches=rng.choice([0, 0, 1, 2]),
        num_eval_tasks=rng.randint(1, 3),
        chunk_tokens=rng.choice([1, 3, 8]),
        max_turn_tokens=rng.choice([6, 12, 20]),
        max_tokens=rng.choice([40, 96]),
        max_turns=rng.randint(1, 3),
        slow_rewards=rng.random() < 0.5,
        num_rollouts=num_rollouts,
        max_running=rng.randint(2, 6),
        lease_s=rng.choice([4.0, 8.0]),
        max_attempts=rng.randint(1, 3),
        commit_interval_s=rng.choice([0.0, 0.005, 0.05]),
        pause_mode=rng.choice(["retract", "in_place"]),
        token_s=rng.choice([0.02, 0.05, 0.15]),
        batch_s=rng.choice([0.3, 1.0, 3.0]),
    )
    rollouts = [f"rollout-{index}" for index in range(num_rollouts)]
    # Short enough that most of it happens while the run still has work.
    storm_s = min(LONGEST_STORM_S, 2.0 + plan.num_batches * (plan.batch_s + 10 * plan.token_s + 0.5))
    events = [_event(rng, rollouts, storm_s) for _ in range(rng.randint(2, 12))]
    events += _second_ones(random.Random(f"second ones {seed}"), rollouts, storm_s)
    events += _damage_checkpoints(random.Random(f"damaged checkpoints {seed}"), storm_s)
    plan = replace(plan, is_deterministic=random.Random(f"rounding {seed}").random() < 0.7)
    events += _half_open(random.Random(f"half open {seed}"), rollouts, storm_s)
    plan, more = _weights(random.Random(f"weights {seed}"), plan, storm_s)
    more += _damage(random.Random(f"damage {seed}"), storm_s)
    if seed % 16 == 5:
        more += _accepted_loss(random.Random(f"accepted loss {seed}"), storm_s)
    more += _poison(random.Random(f"poison {seed}"), plan, storm_s)
    if seed % 8 == 2:
        more += _restore(random.Random(f"restore {seed}"), storm_s, earlier=seed // 8 % 3 > 0)
    else:
        more += _hostile(random.Random(f"hostile {seed}"), storm_s)
    more += _lies(random.Random(f"lies {seed}"), rollouts, storm_s)
    if may_have_agents:
        plan, kills = _agents(random.Random(f"agents play {seed}"), plan, storm_s)
        more += kills
    plan, kills = _compares(random.Random(f"compares {seed}"), plan, storm_s)
    more += kills
    plan = replace(plan, schedules=random.Random(f"schedules {seed}").random() < 0.5)
    plan = _sampling(random.Random(f"sampling {seed}"), plan)
    plan, strikes = _parts(random.Random(f"parts {seed}"), plan, storm_s)
    more += strikes
    if seed % 4 == 3:
        plan = replace(plan, archives=True)
        more += _archive(random.Random(f"archive {seed}"))
    if may_be_stopped:
        more += _received(random.Random(f"received {seed}"), storm_s)
    return plan.with_events(tuple(sorted((*events, *more), key=lambda event: event.at)))


def _received(rng: random.Random, storm_s: float) -> list[Event]:
    """In a third of the runs broker or learner dies when the one has just heard of the other; some of them are stopped."""
    if rng.random() < 2 / 3:
        return []
    points: list[Point] = ["publication received", "report received", "checkpoint received", "welcomed"]
    events = [
        Event(
            at=rng.uniform(0.0, storm_s),
            kind="kill_when",
            target=(rng.choice(["broker", "learner"]),),
            seconds=rng.uniform(0.2, 4.0),
            amount=rng.choice([0.0, 0.0, 0.001, 0.005]),
            point=point,
        )
        for point in rng.sample(points, 2)
    ]
    if rng.random() < 0.3:
        # Late, so that most of the weather has a run that goes on.
        events.append(Event(at=rng.uniform(0.5, 1.2) * storm_s, kind="stop"))
    return events


def _sampling(rng: random.Random, plan: Plan) -> Plan:
    """In half of the runs zero-advantage groups are filtered out; in a third there are few tasks, which may rest."""
    plan = replace(plan, max_filtered=rng.choice([0.0, 0.0, 0.3, 4.0]))
    if rng.random() < 2 / 3:
        return plan
    return replace(plan, num_tasks=rng.randint(1, 4), rest_after_groups=rng.choice([0, 1, 1, 2]))


def _weights(rng: random.Random, plan: Plan, storm_s: float) -> tuple[Plan, list[Event]]:
    """In half of the runs versions travel as deltas; in half of those, rollouts share them."""
    if rng.random() < 0.5:
        return plan, []
    shares = rng.random() < 0.5
    # The learner itself serves two rollouts; it sends further ones to those two only when there are further ones.
    plan = replace(plan, has_tables=True, shares_weights=shares, num_rollouts=4 if shares else plan.num_rollouts)
    rollouts = tuple(f"rollout-{index}" for index in range(plan.num_rollouts))
    liars = [("learner",), rollouts] if shares else [("learner",)]
    events = [
        Event(
            at=rng.uniform(0.0, 0.6 * storm_s),
            kind="corrupt",
            target=rng.choice(liars),
            seconds=rng.uniform(3.0, 15.0),
            amount=rng.choice([0.2, 0.5, 0.9]),
        )
        for _ in range(rng.randint(0, 3))
    ]
    return plan, events


def _agents(rng: random.Random, plan: Plan, storm_s: float) -> tuple[Plan, list[Event]]:
    """In a quarter of the runs agents play the episodes, half of them by the clock; there more rollouts die."""
    if rng.random() < 0.75:
        return plan, []
    plan = replace(plan, agents=rng.choice(["replay", "replay", "replay", "restart"]), reads_clock=rng.random() < 0.5)
    points: list[Point] = ["chunk received", "acknowledged"]
    kills = [
        Event(
            at=rng.uniform(0.0, storm_s),
            kind="kill_when",
            target=(f"rollout-{rng.randrange(plan.num_rollouts)}",),
            seconds=rng.uniform(0.2, 1.0),
            amount=rng.choice([0.0, 0.005, 0.2]),
            point=rng.choice(points),
        )
        for _ in range(rng.randint(1, 4))
    ]
    return plan, kills


def _compares(rng: random.Random, plan: Plan, storm_s: float) -> tuple[Plan, list[Event]]:
    """In a quarter of the runs groups are graded together; there processes die when one is about to be, or just was."""
    if rng.random() < 0.75:
        return plan, []
    points: list[Point] = ["grade sent", "graded received", "graded received"]
    kills = [
        Event(
            at=rng.uniform(0.0, storm_s),
            kind="kill_when",
            target=(rng.choice(["broker", *(f"rollout-{number}" for number in range(plan.num_rollouts))]),),
            seconds=rng.uniform(0.2, 3.0),
            amount=rng.choice([0.0, 0.001, 0.1]),
            point=rng.choice(points),
        )
        for _ in range(rng.randint(1, 4))
    ]
    return replace(plan, compares=True), kills


def _parts(rng: random.Random, plan: Plan, storm_s: float) -> tuple[Plan, list[Event]]:
    """In half of the runs batches travel in many parts; there some come damaged, and ends die between two of them."""
    if rng.random() < 0.5:
        return plan, []
    kills = [
        Event(
            at=rng.uniform(0.0, storm_s),
            kind="kill_when",
            target=(rng.choice(["broker", "learner"]),),
            seconds=rng.uniform(0.2, 3.0),
            amount=rng.choice([0.0, 0.001, 0.005]),
            point="part sent",
        )
        for _ in range(rng.randint(0, 2))
    ]
    damage = Event(at=rng.uniform(0.0, 0.6 * storm_s), kind="corrupt", target=("broker",), seconds=8.0, amount=0.2)
    return replace(plan, part_tokens=rng.choice([4, 16, 64])), [*kills, damage]


def _restore(rng: random.Random, storm_s: float, *, earlier: bool) -> list[Event]:
    """A backup is made, and some seconds later the run is lost and restored from it; or to an earlier batch of it."""
    at = rng.uniform(0.6, 1.2) * storm_s if earlier else rng.uniform(0.2, 0.7) * storm_s
    return [Event(at=at, kind="restore", seconds=rng.uniform(0.5, 5.0), amount=float(earlier))]


def _archive(rng: random.Random) -> list[Event]:
    """The broker dies when a file is written that the ledger does not name yet, and just after it named one."""
    points: list[Point] = rng.sample(["archive written", "archived"], rng.randint(1, 2))
    return [
        Event(
            at=rng.uniform(0.0, 6.0),
            kind="kill_when",
            target=("broker",),
            seconds=rng.uniform(0.2, 3.0),
            amount=rng.choice([0.0, 0.001, 0.005]),
            point=point,
        )
        for point in points
    ]


def _poison(rng: random.Random, plan: Plan, storm_s: float) -> list[Event]:
    """In a third of the runs one batch, or the first and the last, ends whoever handles it; later it is requeued."""
    if rng.random() < 0.5:
        return []
    indices = rng.choice([[rng.randrange(plan.num_batches)], [0, plan.num_batches - 1]])
    events = [
        Event(at=0.0, kind="poison", target=(rng.choice(["raises", "dies", "unreadable"]),), amount=float(index))
        for index in indices
    ]
    if rng.random() < 0.5:
        events.append(
            Event(
                at=0.0,
                kind="kill_when",
                target=("broker",),
                seconds=1.0,
                amount=rng.choice([0.0, 0.2]),
                point="batch failed",
            )
        )
    return events + [Event(at=rng.uniform(0.5, 2.0) * storm_s, kind="requeue") for _ in range(rng.randint(0, 3))]


def _hostile(rng: random.Random, storm_s: float) -> list[Event]:
    """In a quarter of the runs an admitted peer is hostile."""
    return [Event(at=rng.uniform(0.0, storm_s), kind="hostile")] if rng.random() < 0.25 else []


def _lies(rng: random.Random, rollouts: list[str], storm_s: float) -> list[Event]:
    """In a third of the runs, an engine reports tokens that no such model can have made."""
    if rng.random() < 2 / 3:
        return []
    return [
        Event(
            at=rng.uniform(0.0, 0.8 * storm_s),
            kind="engine_lies",
            target=(rng.choice(rollouts),),
            amount=float(rng.randint(1, 3)),
        )
        for _ in range(rng.randint(1, 2))
    ]


def _damage(rng: random.Random, storm_s: float) -> list[Event]:
    """In a third of the runs, the broker's files are not what they were when it starts again."""
    if rng.random() < 2 / 3:
        return []
    kind, age_s = float(rng.choices((0, 1, 2), (4, 2, 3))[0]), rng.uniform(0.5, 4.0)  # Never an accepted loss.
    return [Event(at=rng.uniform(0.5, storm_s), kind="damage", target=("broker",), seconds=age_s, amount=kind)]


def _accepted_loss(rng: random.Random, storm_s: float) -> list[Event]:
    """A person goes on from an old copy of the ledger."""
    at, age_s = rng.uniform(0.2, 0.7) * storm_s, rng.uniform(1.0, 4.0)
    return [Event(at=at, kind="damage", target=("broker",), seconds=age_s, amount=LOSS_AMOUNT)]


def _damage_checkpoints(rng: random.Random, storm_s: float) -> list[Event]:
    """In some runs a bit of the newest checkpoint is flipped, and its learner dies."""
    if rng.random() < 0.7:
        return []
    return [
        Event(
            at=rng.uniform(0.3 * storm_s, storm_s),
            kind="damage_checkpoint",
            target=("learner",),
            seconds=rng.uniform(0.2, 3.0),
            amount=rng.random(),
        )
        for _ in range(rng.randint(1, 2))
    ]


def _second_ones(rng: random.Random, rollouts: list[str], storm_s: float) -> list[Event]:
    """In some runs, a second process is started beside one of the same kind."""
    at, delay, down = rng.uniform(0.0, storm_s), rng.uniform(1.0, 12.0), rng.uniform(1.0, 12.0)
    match rng.choices(["nothing", "second_learner", "takeover", "second_rollout"], [5, 1, 1, 1]):
        case ["second_learner"]:
            return [Event(at=at, kind="second_learner", target=(STANDBY,))]
        case ["takeover"]:
            return [Event(at=at, kind="takeover", target=("learner", STANDBY), seconds=down, amount=delay)]
        case ["second_rollout"]:
            return [Event(at=at, kind="second_rollout", target=(rng.choice(rollouts),))]
    return []


def _half_open(rng: random.Random, rollouts: list[str], storm_s: float) -> list[Event]:
    """In some runs, a connection breaks without a word to the end that made it."""
    if rng.random() < 0.4:
        return []
    pairs = [(rng.choice(rollouts), "broker"), (rng.choice(rollouts), "learner"), ("learner", "broker")]
    return [
        Event(at=rng.uniform(0.0, storm_s), kind="half_open", target=rng.choice(pairs)) for _ in range(rng.randint(1, 3))
    ]


KINDS: dict[Kind, int] = {
    "kill": 6,
    "kill_when": 8,
    "terminate": 3,
    "suspend": 3,
    "partition": 3,
    "engine_fails_update": 2,
    "engine_damages": 2,
    "standstill": 1,
    "loss": 2,
    "duplication": 2,
    "slow": 2,
    "disk_full": 2,
    "engine_fails": 1,
    "engine_dies": 1,
    "rewards_fail": 2,
    "leave": 2,
    "join": 1,
}


def _event(rng: random.Random, rollouts: list[str], storm_s: float) -> Event:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    at = rng.uniform(0.0, storm_s)
    rollout = rng.choice(rollouts)
    anybody = rng.choice(["broker", "learner", rollout])
    short, long = rng.uniform(0.2, 3.0), rng.uniform(0.5, 12.0)
    match kind:
        case "kill" | "terminate":
            return Event(at=at, kind=kind, target=(anybody,), seconds=short)
        case "kill_when":
            point = rng.choice(list(POINTS))
            victim = rng.choice(POINTS[point])
            target = (rollout if victim == "rollout" else victim,)
            return Event(
                at=at, kind=kind, target=target, seconds=short, amount=rng.choice([0.0, 0.001, 0.005, 0.2]), point=point
            )
        case "suspend":
            return Event(at=at, kind=kind, target=(anybody,), seconds=long)
        case "partition":
            pair = rng.choice([(rollout, "broker"), (rollout, "learner"), ("learner", "broker")])
            return Event(at=at, kind=kind, target=pair, seconds=long)
        case "slow":
            return Event(at=at, kind=kind, target=(anybody,), seconds=long, amount=rng.uniform(0.3, 2.0))
        case "standstill":
            return Event(at=at, kind=kind, seconds=rng.choice([1.0, 6.0, 60.0, 900.0]))
        case "loss" | "duplication":
            return Event(at=at, kind=kind, seconds=long, amount=rng.uniform(0.02, 0.3))
        case "disk_full":
            return Event(at=at, kind=kind, target=("broker",), seconds=long)
        case "rewards_fail":
            return Event(at=at, kind=kind, seconds=long, amount=rng.uniform(0.2, 0.9))
        case "engine_fails" | "engine_fails_update" | "engine_damages":
            return Event(at=at, kind=kind, target=(rollout,), amount=float(rng.randint(1, 3)))
        case "engine_dies" | "leave":
            return Event(at=at, kind=kind, target=(rollout,), seconds=long)
        case "join":
            return Event(at=at, kind=kind, target=("rollout-late",))
