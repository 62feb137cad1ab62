"""Batches: when one is assembled, from what and for which version, and what a waiting learner is told."""

import pytest

from gspo_protocol.messages import BatchPending, Goodbye
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S
from tests.support.broker.ledger import LEARNER, LedgerHarness, delivered, replies
from tests.support.broker.ledger_training import R1, generate, group_ids, harness, train_one


def test_a_batch_is_recorded_before_it_is_delivered_and_is_the_same_ever_after() -> None:
    world = harness()
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    first = world.store.batch(0)
    assert first[0].group_ids == (0, 1)
    assert [row.trajectory_id for row, _ in first[1]] == [0, 1, 2, 3]
    assert delivered(world.request_batch(0, 1)) == [0]
    world.restart()
    world.hello(LEARNER, "learner")
    assert delivered(world.request_batch(0, 1)) == [0]
    again = world.store.batch(0)
    assert again[0] == first[0]
    assert [row for row, _ in again[1]] == [row for row, _ in first[1]]
    assert world.ledger.state.batches.num_assembled == 1


def test_a_request_waits_and_is_answered_as_soon_as_the_last_episode_finishes() -> None:
    world = harness()
    leases = world.lease(R1, 4, 1)
    for lease in leases[:3]:
        world.episode(R1, lease, 1)
    (pending,) = replies(world.request_batch(0, 1), BatchPending)
    assert (pending.groups_ready, pending.groups_needed) == (1, 2)
    assert "1 more complete groups: 1 of 2 are ready, 1 trajectories under way" in pending.waiting_for
    world.grow(R1, leases[3], 2, 1)
    assert delivered(world.finish(R1, leases[3], 2)) == [0]


def test_pending_is_said_at_most_every_second() -> None:
    world = harness()
    assert len(replies(world.request_batch(0, 1), BatchPending)) == 1
    assert len(replies(world.request_batch(0, 1), BatchPending)) == 0
    assert len(replies(world.tick(1.5), BatchPending)) == 1


def test_a_batch_names_the_due_groups_that_it_waits_for() -> None:
    world = harness(max_lag=0)
    leases = world.lease(R1, 4, 1)
    for lease in leases[1:]:
        world.episode(R1, lease, 1)
    world.fail(R1, leases[0])
    world.request_batch(0, 1)
    pending = replies(world.tick(2.0), BatchPending)[-1]
    assert "1 more complete groups" in pending.waiting_for
    lagging = harness(max_lag=1, num_batches=9)
    leases = lagging.lease(R1, 8, 1)
    for lease in leases[2:6]:
        lagging.episode(R1, lease, 1)
    train_one(lagging, 0, 1)
    for lease in leases[6:]:
        lagging.episode(R1, lease, 1)
    generate(lagging, 4, 2)
    actions = lagging.request_batch(1, 2) + lagging.tick(2.0)
    assert delivered(actions) == []
    pending = replies(actions, BatchPending)[-1]
    assert pending.groups_ready == 3
    assert pending.waiting_for.startswith(
        "1 groups that must not get older: group 0 (0 of 2 finished, 0 free, under way at r1)"
    )


def test_a_batch_is_assembled_only_for_the_published_version() -> None:
    world = harness()
    generate(world, 8, 1)
    (pending,) = replies(world.request_batch(0, 2), BatchPending)
    assert pending.waiting_for == "version 2 to be published, 1 is the newest"
    train_one(world, 0, 1)
    world.now += 2
    (pending,) = replies(world.request_batch(1, 1), BatchPending)
    assert pending.waiting_for == "version 1 to be published, 2 is the newest"
    assert delivered(world.request_batch(1, 2)) == [1]
    world.now += 2
    (pending,) = replies(world.request_batch(2, 2), BatchPending)
    assert pending.waiting_for == "weights trained on 2 batches to be published, version 2 was trained on 1"


def batch_while_version_2_is_announced(world: LedgerHarness) -> LedgerHarness:
    generate(world, 8, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    assert delivered(world.request_batch(1, 2)) == [1]
    return world


def test_a_batch_is_assembled_for_weights_that_are_being_announced_and_counts_its_lag_from_them() -> None:
    world = batch_while_version_2_is_announced(harness())
    batch = world.store.batch(1)[0]
    assert (batch.policy_version, batch.stats.mean_lag) == (2, 1.0)
    assert world.ledger.state.batches.next_version == 3
    world.publish(2, 1)
    world.trained(0, 1)
    assert world.ledger.state.batches.next_version == 3, "the announcement changes nothing"


def test_only_one_version_may_be_unannounced_when_a_batch_is_assembled() -> None:
    world = batch_while_version_2_is_announced(harness(max_lag=3))
    generate(world, 4, 1)
    world.now += 2
    (pending,) = replies(world.request_batch(2, 3), BatchPending)
    assert pending.waiting_for == "version 3 to be published, 1 is the newest"
    assert delivered(world.publish(2, 1)) == [2]


def test_without_lag_a_batch_waits_for_the_announcement_of_its_version() -> None:
    world = harness(max_lag=0)
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    assert world.lease(R1, 4, 1) == []
    assert delivered(world.request_batch(1, 2)) == []
    world.publish(2, 1)
    generate(world, 4, 2)
    assert delivered(world.request_batch(1, 2)) == [1]


def test_a_batch_for_a_version_that_was_never_announced_is_delivered_again_as_it_was() -> None:
    world = batch_while_version_2_is_announced(harness())
    content = group_ids(world, 1)
    world.restart()
    reborn = SessionKey("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    world.hello(reborn, "learner")
    world.publish(3, 0, reborn)
    assert delivered(world.request_batch(0, 3, reborn)) == [0]
    assert delivered(world.request_batch(1, 4, reborn)) == [1]
    assert (world.store.batch(1)[0].policy_version, group_ids(world, 1)) == (2, content)
    assert world.ledger.state.batches.next_version == 5


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_a_departed_learner_requested_goes_to_nobody(in_order: bool) -> None:
    world = harness()
    world.request_batch(0, 1)
    if in_order:
        world.send(LEARNER, Goodbye())
    else:
        world.tick(LEARNER_LEASE_S)
        world.hello(SessionKey("learner", "next"), "learner")
    generate(world, 4, 1)
    world.tick()
    status = world.ledger.status(world.now)
    assert (status["batches_assembled"], status["waiting_for"]) == (0, "the learner to ask for the next batch")
