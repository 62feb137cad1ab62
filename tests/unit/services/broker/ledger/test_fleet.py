"""What state each rollout is in: the table, reports in any order, and which rollouts get leases."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.messages import Goodbye, Heartbeat, LeaseRequest, NoLease, Refused, Role
from gspo_protocol.messages.work import RolloutStatus
from gspo_services.broker.ledger.actions import Action, Note, SessionKey
from gspo_services.broker.ledger.fencing import SILENT_S
from gspo_services.broker.ledger.fleet import NEXT, STATES, Fleet
from tests.support.broker.ledger import LEARNER, LedgerHarness, granted, replies

R = SessionKey("r", "a")
STATUSES = get_args(RolloutStatus)


def transitions(actions: list[Action]) -> list[tuple[str | None, str, str]]:
    """(former, state, level) of each change that is logged."""
    notes = [action for action in actions if isinstance(action, Note) and action.event.startswith("rollout_state")]
    return [(note.fields["former"], note.fields["state"], note.level) for note in notes]


def says(status: str) -> Heartbeat:
    return Heartbeat(policy_version=1, status=status, leases=[])  # type: ignore[arg-type]


def harness() -> LedgerHarness:
    world = LedgerHarness()
    world.hello(LEARNER, "learner")
    world.publish(1, 0)
    return world


def test_each_change_is_logged_once_with_both_states() -> None:
    world = harness()
    seen = transitions(world.hello(R))
    for status in ("starting", "verifying", "serving", "serving", "quarantined", "serving", "draining", "draining"):
        seen += transitions(world.send(R, says(status)))
    seen += transitions(world.send(R, Goodbye(reason="drained")))
    seen += transitions(world.hello(SessionKey("r", "b")))
    path = ["starting", "verifying", "serving", "quarantined", "serving", "draining", "gone", "starting"]
    assert seen == [(former, state, "info") for former, state in zip([None, *path], path, strict=False)]


def test_a_step_that_the_table_does_not_have_is_believed_and_logged_as_a_warning() -> None:
    world = harness()
    world.hello(R)
    world.send(R, says("draining"))
    assert transitions(world.send(R, says("serving"))) == [("draining", "serving", "warning")]
    assert world.ledger.fleet.state("r") == "serving"


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "serving"])
def test_only_a_rollout_that_has_said_that_it_serves_gets_leases(status: str) -> None:
    world = harness()
    world.hello(R)
    request = LeaseRequest(request_id=1, capacity=1, policy_version=1)
    world.send(R, says("verifying"))
    world.send(R, says(status))
    (answer,) = replies(world.ledger.on_message(R, request, None, world.now), NoLease)
    assert answer.reason == "not_serving"
    world.send(R, says("serving"))
    assert len(granted(world.send(R, request))) == 1


def test_a_rollout_that_is_silent_for_long_has_gone_and_its_next_life_starts_afresh() -> None:
    world = harness()
    world.hello(R)
    world.send(R, says("serving"))
    assert ("serving", "gone", "info") in transitions(world.tick(SILENT_S + 1))
    status = world.ledger.status(world.now)
    assert (status["rollouts"], status["rollouts_gone"]) == ([], ["r"])
    world.hello(R)
    status = world.ledger.status(world.now)
    assert ([rollout["status"] for rollout in status["rollouts"]], status["rollouts_gone"]) == (["starting"], [])


def test_the_table_names_every_state_and_ends_with_gone() -> None:
    assert set(NEXT) == set(STATES)
    assert NEXT["gone"] == frozenset()
    assert all("gone" in following for state, following in NEXT.items() if state != "gone")


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["hello", *STATES])), max_size=40))
def test_whatever_is_reported_every_rollout_is_in_one_state_and_impossible_steps_are_warnings(
    said: list[tuple[str, str]],
) -> None:
    fleet = Fleet()
    model: dict[str, str] = {}
    for peer, what in said:
        former = model.get(peer)
        if what == "hello":
            (note,) = fleet.begins(peer)
            model[peer] = "starting"
        else:
            notes = fleet.changes(peer, what, "test")  # type: ignore[arg-type]
            assert len(notes) == (former is not None and former != what)
            if not notes:
                continue
            (note,) = notes
            assert former is not None
            assert note.level == ("info" if what in NEXT[former] else "warning")  # type: ignore[index]
            model[peer] = what
        assert (note.fields["peer"], note.fields["former"], note.fields["state"]) == (peer, former, model[peer])
    assert {peer: fleet.state(peer) for peer in model} == model
    assert fleet.counts() == {state: list(model.values()).count(state) for state in STATES}
    assert set(fleet.gone) == {peer for peer, state in model.items() if state == "gone"}


@pytest.mark.parametrize("role", ["operator", "learner"])
def test_only_a_rollout_can_put_itself_out_of_service(role: Role) -> None:
    world = LedgerHarness()
    world.hello(R)
    world.send(R, says("serving"))
    namesake = SessionKey(R.peer, "another")
    assert not replies(world.hello(namesake, role), Refused)
    world.send(namesake, Goodbye())
    assert world.ledger.fleet.state(R.peer) == "serving"
    world.hello(namesake, role)
    world.send(R, says("serving"))
    world.now += SILENT_S - 1
    world.send(R, says("serving"))
    world.tick(2.0)
    assert world.ledger.fleet.state(R.peer) == "serving", "an operator that is forgotten changes nothing, either"
    world.now += SILENT_S
    world.tick(2.0)
    assert world.ledger.fleet.state(R.peer) == "gone"
