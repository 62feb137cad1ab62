"""A trajectory that ends every rollout is given up after a few; kills that are none of its doing use up nothing."""

from dataclasses import replace

import pytest

from tests.simulation.__main__ import told
from tests.simulation.bugs.planting import Bug, planted
from tests.simulation.plan import Event, Plan
from tests.simulation.weather import plan_of
from tests.simulation.world import Outcome, simulate

DEADLY = 2
HELD_OUT = {3}
"""Seeds in which it is a held-out trajectory."""


def plan(seed: int, *events: Event) -> Plan:
    """A run of one broker in this weather alone."""
    calm = replace(plan_of(seed, may_have_agents=False), events=(), max_filtered=0.0)
    return calm.with_events(events)


def given_up(outcome: Outcome) -> set[int]:
    """The trajectories that were given up because their holders ended."""
    failed = [line.fields for line in outcome.history if line.event == "attempt_failed"]
    return {fields["trajectory_id"] for fields in failed if " ended 3 rollouts, one after the other" in fields["reason"]}


@pytest.mark.parametrize("seed", [0, 3])
def test_a_trajectory_that_ends_every_rollout_is_given_up_alone_and_the_run_goes_on(seed: int) -> None:
    outcome = simulate(plan(seed, Event(at=0.0, kind="deadly", amount=DEADLY)))
    assert outcome.violation is None, told(outcome)
    assert given_up(outcome) == {DEADLY}
    # Without a group that trains, where it is held out.
    assert outcome.happened["group dropped: failed"] == (seed not in HELD_OUT)
    # One more where it was not alone, or where a token of it arrived.
    assert 3 <= outcome.happened["rollout died of its trajectory"] <= 5


@pytest.mark.parametrize("seed", [0, 4])
def test_rollouts_that_are_killed_again_and_again_use_up_no_attempt(seed: int) -> None:
    kills = replace(plan(seed), num_batches=10)
    events = [
        Event(at=1.0 + 4.0 * number, kind="kill", target=(f"rollout-{number % kills.num_rollouts}",), seconds=1.0)
        for number in range(12)
    ]
    outcome = simulate(kills.with_events(tuple(events)))
    assert outcome.violation is None, told(outcome)
    assert outcome.happened["kill rollout"] >= 2
    assert given_up(outcome) == set()


def test_without_the_count_the_run_would_never_end() -> None:
    bug = Bug(
        name="losses are not counted", module="gspo_services.broker.ledger.losses",
        old="if not is_unused(row) or life in row.lost_by", new="if True", invariants=("liveness",),
    )  # fmt: skip
    with planted(bug):
        outcome = simulate(plan(0, Event(at=0.0, kind="deadly", amount=DEADLY)))
    assert outcome.violation is not None
    assert outcome.happened["rollout died of its trajectory"] > 10
