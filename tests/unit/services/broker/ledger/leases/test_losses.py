"""Trajectories whose holders end without a word: one that ends them all is given up, and no other one is."""

import pytest

from gspo_protocol.messages import Goodbye, Heartbeat, Release
from gspo_services.broker.ledger.actions import Action, GrantLease, Note, SessionKey
from gspo_services.broker.ledger.losses import MOST
from tests.support.broker.ledger import LedgerHarness
from tests.support.broker.ledger_leases import R1, R2, harness

MANY = {"groups_per_batch": 8, "max_attempts": 4, "failure_budget": 3}
BEAT = Heartbeat(policy_version=1, status="serving", leases=[])


def next_life(world: LedgerHarness, former: SessionKey) -> tuple[SessionKey, list[Action]]:
    """The process ends without a word, and begins again: its new session, and what follows."""
    again = SessionKey(former.peer, f"{former.session}+")
    return again, [*world.hello(again), *world.send(again, BEAT)]


def alone(**changes: object) -> tuple[LedgerHarness, SessionKey]:
    """A run with one rollout."""
    world = harness(**{**MANY, **changes})
    world.send(R2, Goodbye())
    return world, R1


def losses(world: LedgerHarness, lease: GrantLease) -> int:
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    return len(row.lost_by)


def reasons(actions: list[Action]) -> list[str]:
    return [each.fields["reason"] for each in actions if isinstance(each, Note) and each.event == "attempt_failed"]


def test_a_trajectory_that_ends_every_holder_is_given_up_with_its_group_and_the_reason() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    world.grow(sender, lease, 4, 1)
    said: list[list[str]] = []
    for _ in range(MOST + 1):
        sender, actions = next_life(world, sender)
        said.append(reasons(actions))
        assert said[-1] or world.lease(sender)[0].trajectory_id == lease.trajectory_id
    # Under the first lease it had brought tokens.
    assert [len(each) for each in said] == [0, 0, 0, 1]
    assert said[-1][0].startswith(f"trajectory {lease.trajectory_id} ended 3 rollouts, one after the other")
    assert said[-1][0].count("r1 (session ") == 3
    (line,) = world.lines
    assert (line["event"], line["reason"], line["num_tokens"]) == ("dropped", "failed", [4, 0])
    assert world.lease(sender)[0].group_id != lease.group_id
    assert world.ledger.state.run.failures_in_a_row == 1


def test_it_counts_whether_the_holder_is_silent_says_goodbye_or_comes_back() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    world.tick(world.config.lease_s + 2)
    assert losses(world, lease) == 1
    sender, _ = next_life(world, sender)
    world.lease(sender)
    world.send(sender, Goodbye())
    assert losses(world, lease) == 2
    sender, _ = next_life(world, sender)
    world.lease(sender)
    _, actions = next_life(world, sender)
    assert len(reasons(actions)) == 1


def test_a_rollout_that_lives_counts_once_however_often_it_is_silent_and_not_while_it_is_heard() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    for _ in range(2 * MOST):
        for _ in range(4):
            world.tick(world.config.lease_s / 4 + 1)
            world.send(sender, BEAT)
        assert world.lease(sender)[0].trajectory_id == lease.trajectory_id
    assert losses(world, lease) == 0
    for _ in range(2 * MOST):
        world.tick(world.config.lease_s + 2)
        assert world.lease(sender)[0].trajectory_id == lease.trajectory_id
    assert losses(world, lease) == 1
    assert world.lines == []


def test_a_token_shows_that_it_gets_on() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    for life in range(4 * MOST):
        sender, _ = next_life(world, sender)
        (lease,) = world.lease(sender)
        if life % MOST == 1:
            world.grow(sender, lease, 4, 1)
    assert world.lines == []


@pytest.mark.parametrize("is_handed_back", [True, False])
def test_what_a_rollout_held_that_leaves_in_order_is_not_lost(is_handed_back: bool) -> None:
    """A scale-down; also one without time for everything."""
    world, sender = alone()
    for _ in range(4 * MOST):
        (lease,) = world.lease(sender)
        world.send(sender, Heartbeat(policy_version=1, status="draining", leases=[]))
        if is_handed_back:
            release = Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="draining", failed=False)
            world.send(sender, release)
            world.send(sender, Goodbye())
        sender, _ = next_life(world, sender)
    assert losses(world, lease) == 0
    assert world.lines == []


def test_losses_outlive_the_broker() -> None:
    world, sender = alone()
    world.lease(sender)
    said: list[str] = []
    for _ in range(MOST):
        world.restart()
        sender, actions = next_life(world, sender)
        world.lease(sender)
        said += reasons(actions)
    assert len(said) == 1


def test_those_that_were_held_beside_it_are_not_given_up_with_it() -> None:
    world, sender = alone()
    (poison, *_) = world.lease(sender, capacity=8)
    said: list[str] = []
    for _ in range(12):
        sender, actions = next_life(world, sender)
        said += reasons(actions)
        held = world.lease(sender, capacity=8)
        # It lives as long as it has not got that one.
        while held and poison.trajectory_id not in {lease.trajectory_id for lease in held}:
            for lease in held:
                world.grow(sender, lease, 2, 1)
            held = world.lease(sender, capacity=8)
    assert [each.split(" ended")[0] for each in said] == [f"trajectory {poison.trajectory_id}"]
    assert [line["group_id"] for line in world.lines] == [poison.group_id]


def test_one_that_makes_a_step_in_each_life_does_not_take_others_with_it() -> None:
    """It brings a token each time, so it is not counted; those beside it have none yet."""
    world, sender = alone()
    (steps, *_) = world.lease(sender, capacity=8)
    for _ in range(12):
        world.grow(sender, steps, 1, 1)
        sender, actions = next_life(world, sender)
        assert reasons(actions) == []
        held: list[GrantLease] = []
        while steps.trajectory_id not in {lease.trajectory_id for lease in held}:
            for lease in held:
                world.grow(sender, lease, 1, 1)
            held = world.lease(sender, capacity=8)
        (steps,) = [lease for lease in held if lease.trajectory_id == steps.trajectory_id]
    assert world.lines == []


def test_a_suspect_goes_to_a_rollout_without_work_which_gets_nothing_else_until_a_token_comes() -> None:
    world = harness(**MANY)
    (suspect,) = world.lease(R1)
    sender = R1
    for _ in range(MOST - 1):
        sender, _ = next_life(world, sender)
        if losses(world, suspect) < MOST - 1:
            world.lease(sender)
    (beside,) = world.lease(R2)
    assert beside.trajectory_id == suspect.trajectory_id, "R2 has no work"
    assert world.lease(R2, capacity=8) == []
    assert len(world.lease(sender, capacity=2)) == 2
    world.send(R2, Release(trajectory_id=beside.trajectory_id, epoch=beside.epoch, reason="no room", failed=False))
    assert suspect.trajectory_id not in {lease.trajectory_id for lease in world.lease(sender, capacity=4)}
    (again,) = world.lease(R2, capacity=8)
    assert again.trajectory_id == suspect.trajectory_id
    world.grow(R2, again, 4, 1)
    assert len(world.lease(R2, capacity=8)) == 8


def test_a_fleet_that_is_killed_again_and_again_gives_up_at_most_one_trajectory_a_rollout() -> None:
    world = harness(**{**MANY, "failure_budget": 100})
    fleet = [R1, R2]
    held = [world.lease(sender, capacity=4) for sender in fleet]
    for _ in range(MOST - 1):
        fleet = [next_life(world, sender)[0] for sender in fleet]
        assert world.lines == []
        held = [world.lease(sender, capacity=4) for sender in fleet]
    assert all(held)
    said = [reason for sender in fleet for reason in reasons(next_life(world, sender)[1])]
    assert len(said) <= len(fleet)


def test_a_rollout_that_keeps_ending_gives_up_nothing_while_another_one_serves() -> None:
    """The fault may be its own. ``r2`` has no room, so nothing that r1 loses gets on."""
    world = harness(**{**MANY, "failure_budget": 1})
    sender = R1
    for _ in range(6 * MOST):
        world.lease(sender, capacity=4)
        world.send(R2, BEAT)
        sender, actions = next_life(world, sender)
        assert reasons(actions) == []
    assert world.lines == []
    # One that has been silent for long does not serve.
    world.tick(world.config.lease_s + 2)
    world.lease(sender, capacity=4)
    _, actions = next_life(world, sender)
    assert len(reasons(actions)) == 1


def test_a_trajectory_that_ends_one_rollout_after_the_other_is_given_up_while_others_serve() -> None:
    world = harness(**MANY)
    (lease,) = world.lease(R1)
    senders = [R1, R2]
    said: list[str] = []
    for number in range(MOST):
        senders[number % 2], actions = next_life(world, senders[number % 2])
        said += reasons(actions)
        world.lease(senders[(number + 1) % 2])
    assert len(said) == 1
    assert said[0].startswith(f"trajectory {lease.trajectory_id} ended 3 rollouts")
    assert "r2 (session " in said[0]


def test_one_that_ends_whoever_grades_its_group_is_given_up() -> None:
    world, sender = alone(grades_groups=True)
    first, second = world.lease(sender, capacity=2)
    world.episode(sender, first, 1)
    world.episode(sender, second, 1)
    said: list[str] = []
    for _ in range(MOST):
        (grade,) = world.lease(sender)
        assert grade.trajectory_id == second.trajectory_id
        sender, actions = next_life(world, sender)
        said += reasons(actions)
    assert len(said) == 1
    assert [line["group_id"] for line in world.lines] == [first.group_id]


def test_a_held_out_trajectory_is_given_up_without_its_evaluation() -> None:
    world, sender = alone(evaluate_every_batches=1, num_eval_tasks=2)
    (lease,) = world.lease(sender)
    assert lease.split == "eval"
    said: list[str] = []
    for _ in range(MOST):
        sender, actions = next_life(world, sender)
        said += reasons(actions)
        world.lease(sender)
    assert len(said) == 1
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.status == "failed"
