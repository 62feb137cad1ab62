"""The work side of the ledger: leases, chunks, finished and failed episodes."""

from typing import Any

import pytest

from protocol.limits import MAX_LEASES_PER_PEER
from protocol.messages import (
    Ack,
    Chunk,
    Finish,
    Goodbye,
    Heartbeat,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    NoLease,
    Pulse,
    Refused,
    Release,
    Segment,
    VersionRun,
)
from services.broker.actions import Who
from tests.support.broker_ledger import LEARNER, LedgerHarness, chunk, config_with, granted, replies
from tests.support.broker_peers import tokens_of

R1 = Who("r1", "a")
R2 = Who("r2", "a")


def harness(version: int = 1, **changes: Any) -> LedgerHarness:
    """Two rollouts and a learner that has published ``version``."""
    made = LedgerHarness(config_with(**changes))
    made.hello(LEARNER, "learner")
    made.hello(R1)
    made.hello(R2)
    for number in range(1, version + 1):
        made.publish(number, 0)
    return made


def tokens_at(world: LedgerHarness, trajectory_id: int) -> list[int]:
    return [int(token) for token in world.store.payload(trajectory_id).token_ids]


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


def test_the_answer_to_a_request_that_is_filled_in_part_ends_with_why() -> None:
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


def test_the_lease_is_durable_before_it_is_sent() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    row = world.restored().state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.epoch, row.holder_peer, row.status) == (lease.epoch, "r1", "leased")


def test_an_acknowledged_chunk_is_on_disk() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    actions = world.grow(R1, lease, 5, 1)
    assert [ack.next_seq for ack in replies(actions, Ack)] == [1]
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 5))


def test_a_duplicate_chunk_is_acknowledged_but_stored_once() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 5, 1)
    again = world.send(R1, chunk(lease, 0, 5, 1), seq=0)
    assert [ack.next_seq for ack in replies(again, Ack)] == [1]
    world.restart()
    world.hello(R1)
    after_restart = world.send(R1, chunk(lease, 0, 5, 1))
    assert [ack.next_seq for ack in replies(after_restart, Ack)] == [2]
    assert replies(after_restart, LeaseEnded) == []
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 5))


def test_a_message_behind_a_gap_in_the_sequence_is_not_taken() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    actions = world.send(R1, chunk(lease, 0, 5, 1), seq=1)
    assert [ack.next_seq for ack in replies(actions, Ack)] == [0]
    assert tokens_at(world, lease.trajectory_id) == []


def test_a_chunk_of_an_older_epoch_is_refused_and_still_acknowledged() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 5, 1)
    world.tick(11.0)
    (second,) = world.lease(R2)
    assert (second.trajectory_id, second.epoch, second.num_tokens) == (lease.trajectory_id, lease.epoch + 1, 5)
    actions = world.grow(R1, lease, 3, 1)
    assert [(ended.epoch, ended.reason) for ended in replies(actions, LeaseEnded)] == [(1, "not held by this session")]
    assert [ack.next_seq for ack in replies(actions, Ack)] == [2]
    world.grow(R2, second, 2, 1)
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 7))


def test_an_older_epoch_of_the_same_session_is_fenced_off_too() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 5, 1)
    world.tick(11.0)
    (second,) = world.lease(R1)
    assert (second.trajectory_id, second.epoch) == (lease.trajectory_id, 2)
    assert [ended.epoch for ended in replies(world.grow(R1, lease, 3, 1), LeaseEnded)] == [1]
    assert [ended.epoch for ended in replies(world.finish(R1, lease, 5), LeaseEnded)] == [1]
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 5))


def test_the_right_epoch_from_the_wrong_peer_is_refused() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    assert replies(world.grow(R2, lease, 3, 1), LeaseEnded)
    assert tokens_at(world, lease.trajectory_id) == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"offset": 6}, "gap: offset is 6, acknowledged are 4 tokens"),
        ({"offset": 2, "num_tokens": 4}, "gap: offset is 2"),
        ({"version": 2}, "version 2 to action tokens: published are 1 to 1"),
        ({"version": -1}, "version -1 to action tokens"),
        ({"num_tokens": 61}, "65 tokens, 64 allowed (sampling.max_tokens)"),
    ],
)
def test_a_chunk_that_cannot_be_right_is_refused_and_counts_as_a_failed_attempt(bad: dict[str, int], reason: str) -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    actions = world.send(R1, chunk(lease, **{"offset": 4, "num_tokens": 2, "version": 1} | bad))
    (refused,) = replies(actions, Refused)
    assert reason in refused.reason
    assert not refused.fatal
    assert len(replies(actions, LeaseEnded)) == 1
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.status, row.attempts, row.num_tokens) == ("free", 1, 4)


def test_a_chunk_before_the_holders_own_start_is_no_duplicate() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.tick(11.0)
    (second,) = world.lease(R2)
    assert "gap" in replies(world.grow(R2, second, 4, 1, offset=0), Refused)[0].reason


def test_observation_tokens_carry_no_version_and_do_not_count_as_actions() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    mixed = Chunk(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        offset=0,
        num_tokens=9,
        segments=[Segment("observation", 0, 4), Segment("action", 0, 3), Segment("observation", 0, 2)],
        version_runs=[VersionRun(-1, 4), VersionRun(1, 3), VersionRun(-1, 2)],
    )
    world.send(R1, mixed)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.num_tokens, row.num_action_tokens, row.version_sum, row.min_version, row.num_turns) == (9, 3, 3, 1, 1)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"num_tokens": 5}, "num_tokens is 5, acknowledged are 4 tokens"),
        ({"turn_rewards": [1.0, 2.0]}, "2 turn_rewards for 1 action turns"),
    ],
)
def test_a_finish_that_contradicts_the_ledger_is_refused(finish: dict[str, Any], reason: str) -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    fields = {"num_tokens": 4, "turn_rewards": [1.0]} | finish
    actions = world.send(R1, Finish(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="done", **fields))
    assert reason in replies(actions, Refused)[0].reason
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.attempts == 1


def test_an_episode_without_an_action_token_cannot_finish() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    only_prompt = Chunk(
        trajectory_id=lease.trajectory_id,
        epoch=lease.epoch,
        offset=0,
        num_tokens=4,
        segments=[Segment("observation", 0, 4)],
        version_runs=[VersionRun(-1, 4)],
    )
    world.send(R1, only_prompt)
    assert "no action token" in replies(world.finish(R1, lease, 4), Refused)[0].reason


def test_a_finish_that_is_delivered_again_changes_nothing() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.episode(R1, lease, 1, reward=0.5)
    world.restart()
    world.hello(R1)
    assert replies(world.finish(R1, lease, 3, reward=0.75), LeaseEnded) == []
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.turn_rewards == (0.5,)


def test_a_heartbeat_renews_exactly_the_leases_it_names() -> None:
    world = harness()
    first, second = world.lease(R1, capacity=2)
    world.tick(9.0)
    beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(first.trajectory_id, first.epoch)])
    actions = world.send(R1, beat)
    assert [pulse.policy_version for pulse in replies(actions, Pulse)] == [1]
    ended = replies(world.tick(2.0), LeaseEnded)
    assert [end.trajectory_id for end in ended] == [second.trajectory_id]


def test_a_broker_that_was_not_listening_takes_no_lease_away_for_it() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.tick(4.0)
    world.now += 100.0
    assert replies(world.tick(), LeaseEnded) == []
    assert replies(world.tick(5.0), LeaseEnded) == []
    assert [end.trajectory_id for end in replies(world.tick(2.0), LeaseEnded)] == [lease.trajectory_id]


def test_a_heartbeat_that_names_a_lost_lease_is_told_so() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.tick(11.0)
    beat = Heartbeat(policy_version=1, status="serving", leases=[LeaseKey(lease.trajectory_id, lease.epoch)])
    assert [end.epoch for end in replies(world.send(R1, beat), LeaseEnded)] == [1]


def test_a_new_session_ends_the_leases_of_the_former_one_also_after_a_broker_restart() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.restart()
    reborn = Who("r1", "b")
    world.hello(reborn)
    (again,) = world.lease(reborn)
    assert (again.trajectory_id, again.epoch, again.num_tokens) == (lease.trajectory_id, 2, 4)


def test_the_same_session_keeps_its_leases_over_a_broker_restart_with_a_fresh_deadline() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.now += 9.0
    world.restart()
    world.hello(R1)
    world.tick(9.0)
    assert replies(world.grow(R1, lease, 2, 1), LeaseEnded) == []
    assert tokens_at(world, lease.trajectory_id) == list(tokens_of(lease.trajectory_id, 6))
    world.tick(1.5)
    assert replies(world.grow(R1, lease, 2, 1), LeaseEnded) != []


def test_a_released_trajectory_goes_on_elsewhere_without_a_failed_attempt() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.grow(R1, lease, 4, 1)
    world.send(R1, Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason="drain", failed=False))
    (second,) = world.lease(R2)
    assert (second.trajectory_id, second.num_tokens, second.seed) == (lease.trajectory_id, 4, lease.seed)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert row.attempts == 0


def test_a_lease_that_could_not_be_sent_is_free_again() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.ledger.on_undelivered(lease.trajectory_id, lease.epoch, "", world.now)
    assert [(grant.trajectory_id, grant.epoch) for grant in world.lease(R2)] == [(lease.trajectory_id, 2)]


def test_a_lease_that_can_never_be_sent_is_a_failed_attempt() -> None:
    world = harness()
    (lease,) = world.lease(R1)
    world.ledger.on_undelivered(lease.trajectory_id, lease.epoch, "the task is too large", world.now)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.status, row.attempts) == ("free", 1)


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


def test_what_a_rollout_that_says_goodbye_still_holds_goes_on_elsewhere_at_once() -> None:
    world = harness()
    lease, other = world.lease(R1, capacity=2)
    world.grow(R1, lease, 4, 1)
    (kept,) = world.lease(R2)
    world.send(R1, Goodbye(reason="drained"))
    assert [row.trajectory_id for row in world.ledger.state.groups.leased()] == [kept.trajectory_id]
    assert [again.trajectory_id for again in world.lease(R2, capacity=2)] == [lease.trajectory_id, other.trajectory_id]
    (refused,) = replies(world.send(R1, LeaseRequest(request_id=1, capacity=1, policy_version=1)), Refused)
    assert refused.reason.startswith("unknown session")
    assert world.hello(R1), "it may come back"
