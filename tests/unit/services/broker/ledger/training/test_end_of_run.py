"""How a run ends: its batches are trained, or somebody stops it."""

from gspo_protocol.messages import EndOfRun, Goodbye, Heartbeat, Pulse, StopRequest
from tests.support.broker.ledger import LEARNER, delivered, replies
from tests.support.broker.ledger_training import OPERATOR, R1, generate, harness, train_one


def test_the_run_ends_after_its_batches() -> None:
    world = harness(num_batches=1)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    (end,) = replies(world.request_batch(1, 2), EndOfRun)
    assert (end.index, end.reason) == (1, "all 1 batches are trained")
    assert world.ledger.state.finished
    (pulse,) = replies(world.send(R1, Heartbeat(policy_version=2, status="serving", leases=[])), Pulse)
    assert pulse.stopping


def test_a_stop_lets_the_batch_under_way_end_and_hands_out_nothing_more() -> None:
    world = harness()
    generate(world, 4, 1)
    world.request_batch(0, 1)
    world.send(OPERATOR, StopRequest(reason="enough"))
    assert not world.ledger.state.finished
    assert world.lease(R1, 4, 1) == []
    world.trained(0, 1)
    world.publish(2, 1)
    assert world.ledger.state.finished
    (end,) = replies(world.request_batch(1, 2), EndOfRun)
    assert end.reason == "stopped by operator: enough"
    world.send(LEARNER, Goodbye())
    world.end()
    world.restart()
    world.hello(R1)
    assert len(world.lease(R1, 4, 2)) == 4, "starting again continues the run"


def test_a_waiting_learner_is_told_of_a_stop_at_once() -> None:
    world = harness()
    world.request_batch(0, 1)
    (end,) = replies(world.send(OPERATOR, StopRequest(reason="enough")), EndOfRun)
    assert end.index == 0


def test_a_stop_is_over_when_it_was_carried_out_and_the_learner_has_left() -> None:
    world = harness()
    world.send(OPERATOR, StopRequest(reason="enough"))
    assert world.restored().state.stop_reason == "stopped by operator: enough"
    world.end()
    assert world.restored().state.stop_reason, "the learner has not left: it may not have heard of it"
    world.send(LEARNER, Goodbye())
    world.end()
    assert world.restored().state.stop_reason == ""
    assert world.restored().state.end_reason == ""


def test_the_next_broker_continues_a_stop_that_was_not_carried_out() -> None:
    world = harness()
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    world.send(OPERATOR, StopRequest(reason="enough"))
    world.send(LEARNER, Goodbye())
    world.end()
    assert "enough" in world.restored().state.stop_reason, "batch 0 is assembled and not trained"
