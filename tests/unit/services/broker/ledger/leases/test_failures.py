"""Episodes that fail: attempts, whole groups, and a row of failures that stops the run."""

from gspo_protocol.messages import LeaseEnded, LeaseRequest, NoLease
from tests.support.broker.ledger import replies
from tests.support.broker.ledger_leases import R1, harness


def test_a_group_whose_trajectory_failed_too_often_is_dropped_whole_and_recorded() -> None:
    world = harness(max_attempts=2)
    first, second = world.lease(R1, capacity=2)
    world.grow(R1, second, 4, 1)
    world.fail(R1, first)
    assert world.lines == []
    (again,) = world.lease(R1)
    assert again.trajectory_id == first.trajectory_id
    actions = world.fail(R1, again)
    assert [end.trajectory_id for end in replies(actions, LeaseEnded)] == [second.trajectory_id]
    (line,) = world.lines
    assert (line["event"], line["reason"], line["num_tokens"]) == ("dropped", "failed", [0, 4])
    assert world.ledger.state.num_dropped == {"failed": 1}
    assert world.restored().state.num_dropped == {"failed": 1}
    assert [lease.group_id for lease in world.lease(R1)] == [1], "another prompt takes its place"


def test_too_many_failed_groups_in_a_row_stop_the_run_with_the_reason() -> None:
    world = harness(max_attempts=1, failure_budget=2, groups_per_batch=8)
    world.fail(R1, world.lease(R1, capacity=2)[0])
    assert not world.ledger.state.stop_reason
    (third, fourth) = world.lease(R1, capacity=2)
    world.episode(R1, third, 1)
    world.episode(R1, fourth, 1)  # a complete group between two failed ones
    world.fail(R1, world.lease(R1)[0])
    assert not world.ledger.state.stop_reason
    world.fail(R1, world.lease(R1, capacity=2)[-1])
    assert "2 groups in a row failed (broker.failure_budget)" in world.ledger.state.run.error
    assert "reward timed out" in world.ledger.state.run.error
    (answer,) = replies(world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=1)), NoLease)
    assert answer.reason == "stopping"


def test_the_failures_in_a_row_and_the_stop_outlive_the_broker() -> None:
    world = harness(max_attempts=1, failure_budget=2, groups_per_batch=8)
    world.fail(R1, world.lease(R1, capacity=2)[0])
    world.restart()
    world.hello(R1)
    assert world.ledger.state.run.failures_in_a_row == 1
    world.fail(R1, world.lease(R1, capacity=2)[0])
    assert "2 groups in a row failed" in world.ledger.state.stop_reason
    world.restart()
    world.hello(R1)
    (answer,) = replies(world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=1)), NoLease)
    assert answer.reason == "stopping"
    status = world.ledger.status(world.now)
    assert status["stopping"] == status["error"] == world.ledger.state.stop_reason


def test_a_complete_group_ends_the_row_of_failures_for_the_next_broker_too() -> None:
    world = harness(max_attempts=1, failure_budget=2, groups_per_batch=8)
    world.fail(R1, world.lease(R1, capacity=2)[0])
    for lease in world.lease(R1, capacity=2):
        world.episode(R1, lease, 1)
    assert world.restored().state.run.failures_in_a_row == 0
