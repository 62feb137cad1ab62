"""Which rollout is granted which lease: versions, bounds, and the order of groups and prompts."""

from gspo_protocol.limits import MAX_LEASES_PER_PEER
from gspo_protocol.messages import LeaseRequest, NoLease, Refused, Release
from tests.support.broker.ledger import granted, replies
from tests.support.broker.ledger_leases import R1, R2, harness


def test_nothing_is_leased_before_the_first_publication() -> None:
    world = harness(version=0)
    (answer,) = replies(world.send(R1, LeaseRequest(request_id=4, capacity=2, policy_version=0)), NoLease)
    assert (answer.request_id, answer.reason) == (4, "version_too_old")


def test_an_engine_outside_the_bound_gets_nothing() -> None:
    world = harness(version=5, max_lag=2)
    (answer,) = replies(world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=2)), NoLease)
    assert answer.reason == "version_too_old"
    assert len(world.lease(R1, version=3)) == 1


def test_an_engine_that_claims_an_unpublished_version_is_refused() -> None:
    world = harness()
    actions = world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=2))
    assert "1 is the newest published" in replies(actions, Refused)[0].reason
    assert granted(actions) == []


def test_the_answer_to_a_request_that_is_filled_in_part_ends_with_the_reason() -> None:
    world = harness(max_lag=0)  # the window: 2 groups of 2
    actions = world.send(R1, LeaseRequest(request_id=7, capacity=6, policy_version=1))
    assert [lease.trajectory_id for lease in granted(actions)] == [0, 1, 2, 3]
    assert [answer.reason for answer in replies(actions, NoLease)] == ["window_full"]


def test_the_leases_of_one_rollout_are_bounded_and_those_of_another_are_not_counted() -> None:
    world = harness(groups_per_batch=MAX_LEASES_PER_PEER, group_size=2)
    assert len(world.lease(R1, capacity=MAX_LEASES_PER_PEER - 1)) == MAX_LEASES_PER_PEER - 1
    actions = world.send(R1, LeaseRequest(request_id=1, capacity=2, policy_version=1))
    assert granted(actions) == []
    (refused,) = replies(actions, Refused)
    for part in ("capacity is 2", "r1 holds 4095 leases", "4096 allowed (MAX_LEASES_PER_PEER)", "rollout.max_running"):
        assert part in refused.reason
    assert len(world.lease(R1, capacity=1)) == 1
    assert len(world.lease(R2, capacity=2)) == 2


def test_a_group_is_shared_between_rollouts_before_a_new_one_is_started() -> None:
    world = harness()
    assert [lease.trajectory_id for lease in world.lease(R1, capacity=1)] == [0]
    assert [(lease.trajectory_id, lease.group_id) for lease in world.lease(R2, capacity=2)] == [(1, 0), (2, 1)]


def test_no_more_groups_are_started_than_the_run_needs() -> None:
    world = harness(num_batches=1, groups_per_batch=2, max_lag=4)
    actions = world.send(R1, LeaseRequest(request_id=1, capacity=20, policy_version=1))
    assert len(granted(actions)) == 4
    assert [answer.reason for answer in replies(actions, NoLease)] == ["no_prompts"]


def test_a_prompt_that_was_started_is_not_started_again_after_a_restart() -> None:
    world = harness(num_train_tasks=5, groups_per_batch=4, group_size=1, max_lag=4, num_batches=3)
    before = [lease.task_index for lease in world.lease(R1, capacity=3)]
    world.restart()
    world.hello(R2)
    after = [lease.task_index for lease in world.lease(R2, capacity=7)]
    assert sorted(before + after[:2]) == [0, 1, 2, 3, 4]
    assert sorted(after[2:]) == [0, 1, 2, 3, 4], "the second epoch"
    assert before + after[:2] != after[2:], "each epoch has its own order"


def test_a_resumed_trajectory_comes_before_new_work_and_the_oldest_first() -> None:
    world = harness(group_size=1, groups_per_batch=4)
    leases = world.lease(R1, capacity=3)
    world.grow(R1, leases[2], 4, 1)
    world.send(R1, Release(trajectory_id=2, epoch=1, reason="drain", failed=False))
    world.send(R1, Release(trajectory_id=1, epoch=1, reason="drain", failed=False))
    assert [lease.trajectory_id for lease in world.lease(R2, capacity=3)] == [2, 1, 3]
