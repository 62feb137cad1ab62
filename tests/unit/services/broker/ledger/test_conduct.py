"""What follows for a peer that uses up its quota, and that nothing follows for the others."""

from typing import Any

import pytest

from gspo_protocol.messages import (
    Goodbye,
    Heartbeat,
    LeaseKey,
    LeaseRequest,
    NoLease,
    Pulse,
    Refused,
    Release,
    Status,
    StatusRequest,
    Welcome,
)
from gspo_services.broker.ledger.actions import Action, GrantLease, Note, Offence, SessionKey
from gspo_services.broker.quotas import QUOTAS, SHUT_OUT_S, SLOWED_RETRY_S
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with, granted, replies

HONEST, LIAR = SessionKey("rollout-0", "h"), SessionKey("rollout-7", "l")
BEAT = Heartbeat(policy_version=1, status="serving", leases=[])


def harness(*rollouts: SessionKey, **changes: Any) -> LedgerHarness:
    world = LedgerHarness(config=config_with(max_attempts=2, failure_budget=5, groups_per_batch=8, **changes))
    world.hello(LEARNER, "learner")
    world.publish(1, 0)
    for rollout in rollouts:
        world.hello(rollout)
        world.send(rollout, BEAT)
    return world


def notes(actions: list[Action], event: str) -> list[dict[str, Any]]:
    return [action.fields for action in actions if isinstance(action, Note) and action.event == event]


def lie(world: LedgerHarness) -> tuple[list[Action], bool]:
    """Take a lease and send what cannot be accepted; whether there was a lease."""
    leases = world.lease(LIAR)
    if not leases:
        return [], False
    return world.grow(LIAR, leases[0], 3, version=1, offset=1000), True


def lies_until(world: LedgerHarness, event: str) -> list[Action]:
    """Lie without end, and wait where there is no lease; the last actions."""
    for _ in range(2000):
        actions, leased = lie(world)
        if notes(actions, event):
            return actions
        if not leased:
            world.tick(SLOWED_RETRY_S / 5)
    raise AssertionError(f"no {event}")


def test_a_liar_is_slowed_then_ended_and_the_run_goes_on() -> None:
    world = harness(HONEST, LIAR)
    (slowed,) = notes(lies_until(world, "peer_slowed"), "peer_slowed")
    assert (slowed["peer"], slowed["reason"]) == ("rollout-7", "refused")
    assert world.ledger.status(world.now)["limited"][0]["peer"] == "rollout-7"
    world.lease(LIAR)
    request = LeaseRequest(request_id=5, capacity=8, policy_version=1)
    (no_lease,) = replies(world.send(LIAR, request), NoLease)
    assert (no_lease.reason, no_lease.retry_s) == ("slowed", SLOWED_RETRY_S)
    assert len(world.lease(HONEST, capacity=4)) == 4, "the honest one is not touched"
    assert world.ledger.state.run.error == ""


def test_the_lies_of_one_rollout_do_not_end_the_run_while_another_one_works() -> None:
    """Without this, failure_budget groups in a row fail before an honest rollout has finished one."""
    world = harness(HONEST, LIAR)
    said: list[Action] = []
    for _ in range(200):
        actions, leased = lie(world)
        said += actions
        if not leased:
            world.tick(SLOWED_RETRY_S)
    counted = world.config.failure_budget * world.config.max_attempts / 4
    assert 1 <= len(notes(said, "attempt_failed")) <= counted + 1
    assert len(notes(said, "attempt_not_counted")) > 50
    assert world.ledger.state.stop_reason == ""
    assert world.lease(HONEST)


def test_a_fault_that_all_rollouts_share_is_held_against_the_run() -> None:
    world = harness(LIAR)
    for _ in range(200):
        _, leased = lie(world)
        if world.ledger.state.stop_reason:
            break
        assert leased, "a rollout that is alone is never slowed: the failure budget ends the run"
    assert "failure_budget" in world.ledger.state.run.error


def test_a_rollout_that_lets_its_leases_expire_unused_is_slowed() -> None:
    world = harness(HONEST, LIAR, lease_s=4.0)
    said: list[Action] = []
    for _ in range(60):
        world.lease(LIAR, capacity=32)
        for _ in range(5):
            said += world.tick(1.0)
            world.send(HONEST, BEAT)
            world.send(LIAR, BEAT)
        if notes(said, "peer_slowed"):
            break
    ((slowed),) = notes(said, "peer_slowed")
    assert (slowed["peer"], slowed["reason"]) == ("rollout-7", "expired")
    assert world.lease(HONEST)


def test_a_rollout_that_takes_leases_in_one_session_after_another_is_slowed() -> None:
    world = harness(HONEST)
    said: list[Action] = []
    for number in range(12):
        liar = SessionKey("rollout-7", f"l{number}")
        said += world.hello(liar)
        world.send(liar, BEAT)
        world.lease(liar, capacity=8)
        world.send(HONEST, BEAT)
    ((slowed),) = notes(said, "peer_slowed")
    assert (slowed["peer"], slowed["reason"]) == ("rollout-7", "expired")


def test_a_rollout_that_only_renews_its_leases_holds_up_no_batch_and_ends_no_run() -> None:
    world = harness(HONEST, LIAR, idle_lease_s=60.0)
    said: list[Action] = []
    num_finished = 0
    for _ in range(8):
        held = world.lease(LIAR, capacity=64)
        keys = [LeaseKey(lease.trajectory_id, lease.epoch) for lease in held]
        for _ in range(20):
            said += world.tick(5.0)
            said += world.send(HONEST, BEAT)
            said += world.send(LIAR, Heartbeat(policy_version=1, status="serving", leases=keys))
        for lease in world.lease(HONEST, capacity=4):
            world.episode(HONEST, lease, 1)
            num_finished += 1
    assert num_finished == 32, "after its time each lease is free for others"
    assert notes(said, "peer_slowed")[0]["reason"] == "idle"
    assert len(notes(said, "attempt_failed")) <= 3
    assert len(notes(said, "attempt_not_counted")) > 30
    assert world.ledger.state.stop_reason == ""


def test_reported_failures_and_stale_groups_are_held_against_their_rollout() -> None:
    world = harness(HONEST, LIAR)
    (lease,) = world.lease(LIAR)
    failed = Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="no", failed=True)
    (offence,) = [action for action in world.send(LIAR, failed) if isinstance(action, Offence)]
    assert (offence.by, offence.reason) == (LIAR, "failed")


def shut_out(world: LedgerHarness) -> list[Action]:
    quota = QUOTAS["messages"]
    actions: list[Action] = []
    for _ in range(int(quota.shut_out) + 2):
        actions += world.send(LIAR, BEAT)
        if world.ledger.peers.get(LIAR) is None:
            return actions
    raise AssertionError("never shut out")


def test_a_flood_is_first_ignored_and_then_shut_out_for_a_while_and_then_forgiven() -> None:
    world = harness(HONEST, LIAR)
    (lease,) = world.lease(LIAR)
    said = shut_out(world)
    assert len(replies(said, Pulse)) <= QUOTAS["messages"].slowed
    (refused,) = replies(said, Refused)
    assert not refused.fatal
    assert refused.retry_s > 0
    assert "rollout-7 is shut out for 60 s" in refused.reason
    assert world.ledger.fleet.state("rollout-7") == "gone"
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.status == "free", "its work goes to others at once"
    assert replies(world.hello(LIAR), Welcome) == []
    assert replies(world.send(HONEST, BEAT), Pulse), "the others notice nothing"
    world.tick(SHUT_OUT_S)
    assert replies(world.hello(LIAR), Welcome)
    assert replies(world.send(LIAR, BEAT), Pulse)
    world.tick(SHUT_OUT_S)
    assert world.ledger.status(world.now)["limited"] == []


def test_an_operator_that_floods_is_ignored_and_another_one_is_answered() -> None:
    world = harness()
    flood, other = SessionKey("operator-a", "1"), SessionKey("operator-b", "1")
    world.hello(flood, "operator")
    world.hello(other, "operator")
    answers = sum(len(replies(world.send(flood, StatusRequest()), Status)) for _ in range(1000))
    assert answers <= QUOTAS["messages"].slowed / 20
    assert replies(world.send(other, StatusRequest()), Status)


def test_nothing_is_held_against_the_learner() -> None:
    world = harness()
    for _ in range(int(QUOTAS["messages"].shut_out) + 10):
        world.ledger.on_message(LEARNER, BEAT, None, world.now)
    assert world.ledger.peers.get(LEARNER) is not None
    assert world.ledger.status(world.now)["limited"] == []


def test_a_peer_that_leaves_is_still_known_when_it_comes_back() -> None:
    world = harness(HONEST, LIAR)
    lies_until(world, "peer_slowed")
    world.send(LIAR, Goodbye())
    again = SessionKey(LIAR.peer, "another life")
    world.hello(again)
    world.send(again, BEAT)
    assert len(world.lease(again, capacity=4)) == 1


@pytest.mark.parametrize("capacity", [1, 8])
def test_an_honest_rollout_gets_all_that_it_asks_for(capacity: int) -> None:
    world = harness(HONEST)
    granted_now: list[GrantLease] = granted(
        world.send(HONEST, LeaseRequest(request_id=1, capacity=capacity, policy_version=1))
    )
    assert len(granted_now) == capacity
