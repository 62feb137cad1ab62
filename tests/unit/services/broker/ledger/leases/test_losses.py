"""Trajectories whose holders end without a word: one that ends them all is given up, and no other one is."""

from gspo_protocol.messages import Goodbye, Release
from gspo_services.broker.ledger.actions import Action, GrantLease, Note, SessionKey
from gspo_services.broker.ledger.losses import MOST, TRIAL_S
from tests.support.broker.ledger import LedgerHarness
from tests.support.broker.ledger_leases import R1, R2, harness

MANY = {"groups_per_batch": 8, "max_attempts": 4, "failure_budget": 3}


def next_life(world: LedgerHarness, peer: str = "r1") -> tuple[SessionKey, list[Action]]:
    """The process of this name ends without a word, and begins again: its new session, and what follows."""
    sessions = {each.key.session for each in world.ledger.peers.of_role("rollout") if each.key.peer == peer}
    again = SessionKey(peer, f"{max(sessions, default='a')}+")
    return again, world.hello(again)


def alone(**changes: object) -> tuple[LedgerHarness, SessionKey]:
    """A run with one rollout."""
    world = harness(**{**MANY, **changes})
    world.send(R2, Goodbye())
    return world, R1


def losses(world: LedgerHarness, lease: GrantLease) -> int:
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    return row.losses


def reasons(actions: list[Action]) -> list[str]:
    return [each.fields["reason"] for each in actions if isinstance(each, Note) and each.event == "attempt_failed"]


def test_a_trajectory_that_ends_every_holder_is_given_up_with_its_group_and_the_reason() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    world.grow(sender, lease, 4, 1)
    said: list[list[str]] = []
    for _ in range(MOST + 1):
        sender, actions = next_life(world)
        said.append(reasons(actions))
        assert sum(map(bool, said)) or world.lease(sender)[0].trajectory_id == lease.trajectory_id
    # Under the first lease it had brought tokens.
    assert [len(each) for each in said] == [0, 0, 0, 1]
    assert (
        "3 rollouts ended without a word while they held it, one after the other, and none brought a new token"
        in said[-1][0]
    )
    (line,) = world.lines
    assert (line["event"], line["reason"], line["num_tokens"]) == ("dropped", "failed", [4, 0])
    assert world.lease(sender)[0].group_id != lease.group_id
    assert world.ledger.state.run.failures_in_a_row == 1


def test_it_is_counted_whether_the_holder_is_silent_says_goodbye_or_comes_back() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    world.tick(world.config.lease_s + 2)
    assert losses(world, lease) == 1
    world.lease(sender)
    world.send(sender, Goodbye())
    assert losses(world, lease) == 2
    world.hello(sender)
    world.lease(sender)
    _, actions = next_life(world)
    assert len(reasons(actions)) == 1


def test_a_token_shows_that_it_gets_on() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    for life in range(4 * MOST):
        sender, _ = next_life(world)
        (lease,) = world.lease(sender)
        if life % MOST == 1:
            world.grow(sender, lease, 4, 1)
    assert world.lines == []


def test_what_is_handed_back_is_not_lost() -> None:
    """A scale-down, a drain, an engine that fails in a rollout that lives."""
    world, sender = alone()
    for _ in range(4 * MOST):
        (lease,) = world.lease(sender)
        world.send(sender, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="draining", failed=False))
        world.send(sender, Goodbye())
        sender, _ = next_life(world)
    assert losses(world, lease) == 0
    assert world.lines == []


def test_losses_outlive_the_broker() -> None:
    world, sender = alone()
    (lease,) = world.lease(sender)
    for _ in range(MOST - 1):
        sender, _ = next_life(world)
        world.lease(sender)
    world.restart()
    world.hello(sender)
    assert losses(world, lease) == MOST - 1
    # That it was alone is not durable: the trial begins anew.
    sender, actions = next_life(world)
    assert reasons(actions) == []
    assert [each.trajectory_id for each in world.lease(sender, capacity=8)] == [lease.trajectory_id]
    _, actions = next_life(world)
    assert len(reasons(actions)) == 1


def test_those_that_were_held_beside_it_are_not_given_up_with_it() -> None:
    world, sender = alone()
    (poison, *_) = world.lease(sender, capacity=8)
    given_up: list[str] = []
    for _ in range(12):
        sender, actions = next_life(world)
        given_up += reasons(actions)
        held = world.lease(sender, capacity=8)
        # It lives as long as it has not got that one.
        while held and poison.trajectory_id not in {lease.trajectory_id for lease in held}:
            for lease in held:
                world.grow(sender, lease, 2, 1)
            held = world.lease(sender, capacity=8)
    assert [each.split(":")[0] for each in given_up] == [f"trajectory {poison.trajectory_id}"]
    assert [line["group_id"] for line in world.lines] == [poison.group_id]


def test_one_that_makes_a_step_in_each_life_does_not_take_others_with_it() -> None:
    """It brings a token each time, so it is not counted; those beside it have none yet."""
    world, sender = alone()
    (steps, *_) = world.lease(sender, capacity=8)
    for _ in range(12):
        world.grow(sender, steps, 1, 1)
        sender, actions = next_life(world)
        assert reasons(actions) == []
        held: list[GrantLease] = []
        while steps.trajectory_id not in {lease.trajectory_id for lease in held}:
            for lease in held:
                world.grow(sender, lease, 1, 1)
            held = world.lease(sender, capacity=8)
        (steps,) = [lease for lease in held if lease.trajectory_id == steps.trajectory_id]
    assert world.lines == []


def test_on_trial_a_rollout_gets_nothing_else_until_a_token_comes() -> None:
    world, sender = alone()
    (lease, *_) = world.lease(sender, capacity=1)
    for _ in range(MOST - 1):
        sender, _ = next_life(world)
        (lease,) = world.lease(sender, capacity=1)
    assert world.lease(sender, capacity=8) == []
    world.grow(sender, lease, 4, 1)
    assert losses(world, lease) == MOST - 1, "its lease has not ended"
    assert len(world.lease(sender, capacity=8)) == 8


def test_on_trial_it_waits_for_a_rollout_without_work_and_then_goes_on_beside_others() -> None:
    world = harness(**MANY)
    (beside,) = world.lease(R2)
    world.grow(R2, beside, 4, 1)
    (lease,) = world.lease(R1)
    for _ in range(MOST - 1):
        sender, _ = next_life(world)
        got = world.lease(sender)
    assert got[0].trajectory_id == lease.trajectory_id
    world.send(sender, Release(trajectory_id=lease.trajectory_id, epoch=got[0].epoch, reason="draining", failed=False))
    world.send(sender, Goodbye())
    assert lease.trajectory_id not in {each.trajectory_id for each in world.lease(R2, capacity=4)}
    world.now += TRIAL_S + 1
    assert lease.trajectory_id in {each.trajectory_id for each in world.lease(R2, capacity=4)}
    # Beside others its loss proves nothing.
    _, actions = next_life(world, "r2")
    assert reasons(actions) == []
    assert losses(world, lease) == MOST - 1


def test_a_rollout_that_keeps_ending_gives_up_nothing_that_others_get_on_with() -> None:
    world = harness(**MANY)
    sender = R1
    world.lease(R1, capacity=4)
    for _ in range(6 * MOST):
        sender, actions = next_life(world)
        assert reasons(actions) == []
        for lease in world.lease(R2, capacity=4):
            world.grow(R2, lease, 2, 1)
        world.lease(sender, capacity=4)
    assert world.lines == []


def test_a_trajectory_that_ends_one_rollout_after_the_other_is_given_up_while_others_serve() -> None:
    world = harness(**MANY)
    (lease,) = world.lease(R1)
    senders = {"r1": R1, "r2": R2}
    said: list[str] = []
    for number in range(MOST):
        peer = ("r1", "r2")[number % 2]
        senders[peer], actions = next_life(world, peer)
        said += reasons(actions)
        other = ("r2", "r1")[number % 2]
        world.lease(senders[other])
    assert len(said) == 1
    assert f"trajectory {lease.trajectory_id}:" in said[0]


def test_a_held_out_trajectory_is_given_up_without_its_evaluation() -> None:
    world = harness(**MANY, evaluate_every_batches=1, num_eval_tasks=2)
    world.send(R2, Goodbye())
    sender = R1
    (lease,) = world.lease(sender)
    assert lease.split == "eval"
    said: list[str] = []
    for _ in range(MOST):
        sender, actions = next_life(world)
        said += reasons(actions)
        world.lease(sender)
    assert len(said) == 1
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.status == "failed"
