"""A batch that ends its learner again and again is quarantined, and its groups can be requeued."""

import pytest

from gspo_protocol.messages import (
    BatchFailed,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Goodbye,
    Refused,
    RequeueRequest,
    Resume,
    SkipBatch,
    Trained,
)
from gspo_services.broker.ledger.actions import Action, SessionKey
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S
from gspo_services.broker.rows import GroupRow
from tests.support.broker.ledger import LEARNER, LedgerHarness, delivered, replies
from tests.support.broker.ledger_training import OPERATOR, R1, generate, group_ids, harness, train_one

NAN = "NonFiniteLossError: the loss is nan"


def next_learner(world: LedgerHarness, number: int, *, resume_at: int = 0, silently: bool = True) -> SessionKey:
    """The learner ends, without a word or in order, and another one publishes the weights that it resumes with."""
    former = world.ledger.peers.learner
    if not silently and former is not None:
        world.send(former, Goodbye())
    world.tick(LEARNER_LEASE_S + 1)
    learner = SessionKey("learner", f"life-{number}")
    world.hello(learner, "learner")
    world.publish(world.ledger.state.batches.newest_version + 1, resume_at, learner)
    return learner


def fail(world: LedgerHarness, learner: SessionKey, index: int = 0, *, raised: bool = True) -> list[Action]:
    """The learner gets the batch, reports that it cannot train it, and ends."""
    world.request_batch(index, world.ledger.state.batches.newest_version, learner)
    actions = world.send(learner, BatchFailed(index=index, reason=NAN, raised=raised))
    world.send(learner, Goodbye(reason="failed"))
    return actions


def statuses(world: LedgerHarness, index: int) -> set[str]:
    found = world.store.rows(GroupRow, "WHERE batch = ?", (index,))
    return {row.status for row in found}


def line(world: LedgerHarness, event: str) -> dict[str, object]:
    (found,) = [each for each in world.lines if each["event"] == event]
    return found


def poisoned(**changes: object) -> LedgerHarness:
    """Batch 0 was quarantined after two reports."""
    world = harness(**{"max_lag": 3, "num_batches": 4, **changes})
    generate(world, 4, 1)
    fail(world, LEARNER)
    fail(world, next_learner(world, 2))
    return world


def test_a_batch_that_two_learners_report_is_skipped_by_the_third_and_the_run_goes_on() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    fail(world, LEARNER)
    assert statuses(world, 0) == {"batched"}
    world.restart()
    fail(world, next_learner(world, 2))
    assert statuses(world, 0) == {"quarantined"}
    assert line(world, "quarantined")["batch"] == 0
    assert NAN in str(line(world, "quarantined")["reason"])
    world.restart()
    third = next_learner(world, 3)
    (skip,) = replies(world.request_batch(0, 3, third), SkipBatch)
    assert skip.index == 0
    assert NAN in skip.reason
    assert not replies(world.send(third, Trained(index=0, policy_version=4, metrics={}, skipped=True)), Refused)
    world.publish(4, 1, third)
    assert line(world, "batch_skipped") == {"event": "batch_skipped", "batch": 0, "policy_version": 4}
    world.hello(R1)
    generate(world, 4, 4)
    assert delivered(world.request_batch(1, 4, third)) == [1]


def test_one_learner_counts_once_however_often_its_report_comes() -> None:
    world = harness()
    generate(world, 4, 1)
    world.request_batch(0, 1)
    report = BatchFailed(index=0, reason=NAN, raised=True)
    world.send(LEARNER, report)
    world.restart()
    world.hello(LEARNER, "learner")
    world.send(LEARNER, report)
    assert statuses(world, 0) == {"batched"}


def test_a_batch_that_is_trained_after_a_failure_begins_again_at_nothing() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    fail(world, LEARNER)
    second = next_learner(world, 2)
    world.request_batch(0, 2, second)
    world.trained(0, 3, second)
    fail(world, next_learner(world, 3))
    assert statuses(world, 0) == {"batched"}


@pytest.mark.parametrize("restarts", [False, True])
def test_the_third_learner_in_a_row_that_ends_without_a_word_quarantines_its_batch(restarts: bool) -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    learner = LEARNER
    for number in (2, 3, 4):
        assert statuses(world, 0) <= {"batched"}
        world.request_batch(0, number - 1, learner)
        if restarts:
            world.restart()
        learner = next_learner(world, number)
    assert statuses(world, 0) == {"quarantined"}
    assert "3 learners in a row ended without a word" in str(line(world, "quarantined")["reason"])
    assert len(replies(world.request_batch(0, 4, learner), SkipBatch)) == 1


def test_a_learner_that_ends_at_another_batch_breaks_the_row() -> None:
    world = harness(max_lag=3)
    generate(world, 8, 1)
    world.request_batch(0, 1)
    second = next_learner(world, 2)
    world.request_batch(0, 2, second)
    world.publish(3, 1, second)
    world.request_batch(1, 3, second)
    learner = next_learner(world, 3)
    for number in (4, 5):
        world.request_batch(0, number, learner)
        learner = next_learner(world, number)
    assert statuses(world, 0) == {"batched"}


def test_what_was_trained_is_not_blamed_for_what_came_after() -> None:
    """The learner asks for the next batch before its report of the last one."""
    world = harness(max_lag=3)
    generate(world, 4, 1)
    learner = LEARNER
    for number in (2, 3, 4, 5):
        world.request_batch(0, number - 1, learner)
        world.request_batch(1, number, learner)
        learner = next_learner(world, number)
    assert statuses(world, 0) == {"batched"}


def test_learners_that_end_in_order_do_not_count() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    learner = LEARNER
    for number in (2, 3, 4, 5):
        world.request_batch(0, number - 1, learner)
        learner = next_learner(world, number, silently=False)
    assert statuses(world, 0) == {"batched"}


def test_a_lost_rank_counts_as_an_end_without_a_word() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    learner = LEARNER
    for number in (2, 3, 4):
        assert statuses(world, 0) <= {"batched"}
        fail(world, learner, raised=False)
        learner = next_learner(world, number)
    assert statuses(world, 0) == {"quarantined"}


def test_a_batch_that_cannot_be_read_is_quarantined_at_once() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    world.request_batch(0, 1)
    actions = world.ledger.on_unreadable_batch(LEARNER, 0, "trajectory 1: the chunk at 0 was changed on the disk", world.now)
    assert len(replies(actions, SkipBatch)) == 1
    assert not world.ledger.on_unreadable_batch(LEARNER, 0, "again", world.now)


def test_a_batch_is_trained_or_skipped_as_the_broker_says() -> None:
    world = poisoned()
    learner = next_learner(world, 3)
    (refused,) = replies(world.trained(0, 4, learner), Refused)
    assert (refused.fatal, "must be skipped" in refused.reason) == (True, True)
    world = harness()
    generate(world, 4, 1)
    world.request_batch(0, 1)
    (refused,) = replies(world.send(LEARNER, Trained(index=0, policy_version=2, metrics={}, skipped=True)), Refused)
    assert (refused.fatal, "was not quarantined" in refused.reason) == (True, True)


def test_three_batches_in_a_row_stop_the_run_with_the_last_reason() -> None:
    world = harness(max_lag=3, num_batches=6)
    learner, number = LEARNER, 1
    for index in (0, 1, 2):
        world.hello(R1)
        generate(world, 4, world.ledger.state.batches.newest_version)
        for _ in range(2):
            assert world.ledger.state.stop_reason == ""
            for skipped in range(index):
                world.send(learner, BatchRequest(index=skipped, policy_version=1))
                world.publish(world.ledger.state.batches.newest_version + 1, skipped + 1, learner)
            fail(world, learner, index)
            number += 1
            learner = next_learner(world, number)
    assert "3 batches in a row were quarantined" in world.ledger.state.run.error
    assert NAN in world.ledger.state.run.error
    for skipped in range(3):
        assert replies(world.request_batch(skipped, 1, learner), SkipBatch)
        world.publish(world.ledger.state.batches.newest_version + 1, skipped + 1, learner)
    (end,) = replies(world.request_batch(3, world.ledger.state.batches.newest_version, learner), EndOfRun)
    assert "not in the data" in end.reason


# --- requeued -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_fresh_groups_that_are_requeued_are_trained_as_they_are(restarts: bool) -> None:
    world = poisoned()
    quarantined = group_ids(world, 0)
    learner = next_learner(world, 3)
    world.request_batch(0, 3, learner)
    world.publish(4, 1, learner)
    world.hello(OPERATOR, "operator")
    world.send(OPERATOR, RequeueRequest(batches=[]))
    assert line(world, "requeued")["batches"] == [0]
    assert statuses(world, 0) == {"requeued"}
    if restarts:
        world.restart()
        world.hello(learner, "learner")
    world.hello(R1)
    assert world.lease(R1, 1, 4)
    assert delivered(world.request_batch(1, 4, learner)) == [1]
    assert group_ids(world, 1) == quarantined
    world.restart()
    assert world.ledger.state.quarantine.reason(0) != ""


@pytest.mark.parametrize("restarts", [False, True])
def test_prompts_of_groups_that_are_requeued_too_late_are_sampled_again(restarts: bool) -> None:
    world = poisoned(max_lag=1)
    quarantined = {row.group_id: row for row in world.store.rows(GroupRow, "WHERE batch = 0")}
    learner = next_learner(world, 3)
    world.request_batch(0, 3, learner)
    world.publish(4, 1, learner)
    world.hello(OPERATOR, "operator")
    world.send(OPERATOR, RequeueRequest(batches=[0]))
    if restarts:
        world.restart()
        world.hello(learner, "learner")
    world.hello(R1)
    for lease in world.lease(R1, 4, 4):
        world.episode(R1, lease, 4)
    again = world.store.rows(GroupRow, "WHERE replaces IS NOT NULL ORDER BY group_id")
    assert [(row.replaces, row.prompt, row.task_index) for row in again] == [
        (row.group_id, row.prompt, row.task_index) for row in quarantined.values()
    ]
    assert statuses(world, 0) == {"resampled"}
    assert delivered(world.request_batch(1, 4, learner)) == [1]
    assert group_ids(world, 1) == tuple(row.group_id for row in again)


def test_a_batch_that_is_not_quarantined_is_not_requeued() -> None:
    world = poisoned()
    world.hello(OPERATOR, "operator")
    (refused,) = replies(world.send(OPERATOR, RequeueRequest(batches=[0, 3])), Refused)
    assert (refused.fatal, refused.reason) == (
        False,
        "requeue_request: batch 3 is not in quarantine, or was requeued before; in quarantine: 0",
    )
    assert statuses(world, 0) == {"quarantined"}
    world.send(OPERATOR, RequeueRequest(batches=[0]))
    (refused,) = replies(world.send(OPERATOR, RequeueRequest(batches=[0])), Refused)
    assert "in quarantine: none" in refused.reason


def test_nothing_is_quarantined_once_a_checkpoint_covers_it() -> None:
    world = harness(max_lag=3)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    generate(world, 4, 2)
    train_one(world, 1, 2)
    world.send(LEARNER, Checkpointed(next_batch=1, policy_version=2))
    for number in (2, 3, 4):
        world.send(next_learner(world, number, resume_at=2), BatchFailed(index=0, reason=NAN, raised=True))
    assert statuses(world, 0) == {"batched"}


def test_a_batch_that_is_trained_again_from_an_older_checkpoint_may_be_quarantined() -> None:
    world = harness(max_lag=3)
    for index in (0, 1):
        generate(world, 4, index + 1)
        train_one(world, index, index + 1)
    world.send(LEARNER, Checkpointed(next_batch=2, policy_version=3))
    for number in (2, 3):
        learner = next_learner(world, number, silently=False)
        world.send(learner, Resume(next_batch=0))
        fail(world, learner, 0)
    assert statuses(world, 0) == {"quarantined"}
    assert statuses(world, 1) == {"batched"}


def test_status_names_what_is_quarantined() -> None:
    world = poisoned()
    status = world.ledger.status(world.now)
    assert status["groups"]["quarantined"] == 2
    assert (status["quarantined"]["batches"], status["quarantined"]["groups"]) == (1, 2)
    (named,) = status["quarantined"]["newest"]
    assert (named["batch"], named["groups"]) == (0, 2)
    assert NAN in named["reason"]
    world.hello(OPERATOR, "operator")
    world.send(OPERATOR, RequeueRequest(batches=[]))
    assert world.ledger.status(world.now)["quarantined"]["batches"] == 0
