"""A lease that brings nothing for far longer than usual is taken back while everybody waits for it, and only then."""

from typing import Any

import pytest

from gspo_protocol.messages import Graded, Heartbeat, LeaseEnded, LeaseKey, LeaseRequest
from gspo_services.broker.ledger.actions import Action, GrantLease, Note, Offence
from gspo_services.broker.quotas.progress import ENOUGH, FACTOR, MEASURED, MIN_PATIENCE_S, ROOM_S, Progress
from tests.support.broker.ledger import LedgerHarness, delivered, granted, replies
from tests.support.broker.ledger_leases import R1, R2, harness

LATE = 7
"""A trajectory."""


def experienced(step_s: float = 0.5) -> Progress:
    """Rollouts have worked for a while, and one of them has room since second 0."""
    progress = Progress()
    progress.began(0, -MEASURED * step_s)
    for number in range(MEASURED):
        progress.moved((0,), (number - MEASURED + 1) * step_s)
    progress.ended(0, done=True)
    progress.began(LATE, 0.0)
    progress.has_room("r2", 0.0)
    return progress


@pytest.mark.parametrize("step_s", [0.5, 20.0])
def test_late_is_a_multiple_of_what_is_usual_and_never_less_than_some_seconds(step_s: float) -> None:
    progress, patience = experienced(step_s), max(MIN_PATIENCE_S, FACTOR * step_s)
    for now, late in ((patience - 0.1, {}), (patience, {LATE: patience})):
        progress.has_room("r2", now)
        assert progress.late(now) == late


def test_the_usual_step_is_a_slow_one_of_those_that_were_seen_lately() -> None:
    progress = experienced(0.5)
    for number in range(MEASURED // 50):
        progress.began(number, 0.0)
        progress.moved((number,), 30.0)
    assert progress.usual_s() == 30.0, "one step in fifty, as with a tool that is sometimes slow"


def test_nobody_is_late_before_enough_was_seen_or_while_nobody_has_room() -> None:
    progress = Progress()
    for number in range(ENOUGH - 1):
        progress.began(number, 0.0)
        progress.moved((number,), 0.1)
        progress.ended(number, done=True)
    progress.began(LATE, 0.0)
    progress.has_room("r2", 1000.0)
    assert progress.late(1000.0) == {}
    progress = experienced()
    assert progress.late(ROOM_S) == {}
    assert progress.late(1000.0) == {}, "the last one that had room asked long ago"


def test_a_trajectory_that_was_taken_back_gets_twice_the_time() -> None:
    progress, now = experienced(), 0.0
    for times in range(4):
        for seconds, late in ((MIN_PATIENCE_S * 2**times - 0.1, False), (MIN_PATIENCE_S * 2**times, True)):
            progress.has_room("r2", now + seconds)
            assert bool(progress.late(now + seconds)) == late
        now += MIN_PATIENCE_S * 2**times
        progress.took_back(LATE)
        progress.began(LATE, now)


def waiting(**changes: Any) -> tuple[LedgerHarness, GrantLease]:
    """R2 has made what fits the window and has room; the learner waits for the group of which R1 holds a lease."""
    world = harness(groups_per_batch=ENOUGH, group_size=2, max_lag=0, lease_s=60.0, **changes)
    (stuck,) = world.lease(R1)
    for _ in range(2 * ENOUGH - 1):
        (lease,) = world.lease(R2)
        world.episode(R2, lease, 1)
    world.request_batch(0, 1)
    return world, stuck


def told(world: LedgerHarness, lease: GrantLease, *, has_room: bool = True) -> list[Action]:
    """A second passes; R1 renews its lease, and R2 asks for work."""
    said = world.tick(1.0)
    world.send(R1, Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)]))
    if has_room:
        said += world.send(R2, LeaseRequest(request_id=1, capacity=1, policy_version=1))
    return said


def test_a_lease_that_everybody_waits_for_goes_to_a_rollout_that_has_room() -> None:
    world, stuck = waiting()
    said: list[Action] = []
    for _ in range(int(MIN_PATIENCE_S) + 1):
        said += told(world, stuck)
    (ended,) = replies(said, LeaseEnded)
    assert ended.trajectory_id == stuck.trajectory_id
    assert "far longer than usual, and the learner waits" in ended.reason
    (note,) = [action for action in said if isinstance(action, Note) and action.event == "lease_taken_back"]
    assert (note.fields["peer"], note.fields["silent_s"]) == (R1.peer, MIN_PATIENCE_S)
    assert [action.by for action in said if isinstance(action, Offence)] == [R1]
    (again,) = granted(said)
    assert (again.to, again.trajectory_id, again.epoch) == (R2, stuck.trajectory_id, stuck.epoch + 1)
    row = world.ledger.state.groups.trajectory(stuck.trajectory_id)
    assert row is not None
    assert row.attempts == 0, "nothing has failed"


def test_one_that_is_taken_from_a_rollout_that_has_ended_is_lost() -> None:
    world, stuck = waiting(min_patience_s=40.0)
    said: list[Action] = []
    while not granted(said):
        said += [*world.tick(1.0), *world.send(R2, LeaseRequest(request_id=1, capacity=1, policy_version=1))]
    assert any(isinstance(action, Note) and action.event == "lease_taken_back" for action in said)
    row = world.ledger.state.groups.trajectory(stuck.trajectory_id)
    assert row is not None
    assert [peer for peer, _ in row.lost_by] == [R1.peer]


def test_it_stays_while_the_learner_is_busy_or_nobody_has_room() -> None:
    world, stuck = waiting()
    for _ in range(20):
        assert replies(told(world, stuck, has_room=False), LeaseEnded) == []
    world, stuck = waiting()
    world.ledger.training.session_ended()
    for _ in range(20):
        assert replies(told(world, stuck), LeaseEnded) == []


def test_who_grades_a_group_is_not_late_because_no_token_comes() -> None:
    world = harness(groups_per_batch=ENOUGH, group_size=2, max_lag=0, lease_s=60.0, grades_groups=True)
    left = ENOUGH
    while left:
        (lease,) = world.lease(R2 if left > 1 else R1)
        if not lease.members:
            world.episode(lease.to, lease, 1)
            continue
        left -= 1
        graded = Graded(trajectory_id=lease.trajectory_id, epoch=lease.epoch, rewards=[0.0, 1.0], components=[{}, {}])
        if left:
            world.send(R2, graded)
    world.request_batch(0, 1)
    for _ in range(20):
        assert replies(told(world, lease), LeaseEnded) == []
    assert delivered(world.send(R1, graded)) == [0]


def test_the_only_rollout_keeps_its_leases() -> None:
    world, stuck = waiting()
    said: list[Action] = []
    for _ in range(20):
        said += told(world, stuck, has_room=False)
        said += world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=1))
    assert replies(said, LeaseEnded) == []
