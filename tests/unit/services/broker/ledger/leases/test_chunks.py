"""Chunks and finishes: stored once, fenced by epoch, refused when they contradict the ledger."""

from typing import Any

import pytest

from gspo_protocol.messages import Ack, Chunk, Finish, LeaseEnded, Refused, Segment, VersionRun
from tests.support.broker.ledger import chunk, replies
from tests.support.broker.ledger_leases import R1, R2, harness, tokens_at
from tests.support.broker.peers import tokens_of


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
        ({"offset": 6}, "gap: offset is 6, 4 tokens are acknowledged"),
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
        segments=[Segment("observation", 0, 4), Segment("action", 0, 3), Segment("observation", 1, 2)],
        version_runs=[VersionRun(-1, 4), VersionRun(1, 3), VersionRun(-1, 2)],
        state={},
        turn_rewards=[0.5],
    )
    world.send(R1, mixed)
    row = world.ledger.state.groups.trajectory(lease.trajectory_id)
    assert row is not None
    assert (row.num_tokens, row.num_action_tokens, row.version_sum, row.min_version, row.num_turns) == (9, 3, 3, 1, 1)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"num_tokens": 5}, "num_tokens is 5, 4 tokens are acknowledged"),
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
        state={},
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
