"""Learners that come back, that replace one another, and that have the checkpoint of another run."""

from typing import Any

import pytest

from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import (
    BatchRequest,
    Checkpointed,
    Goodbye,
    Heartbeat,
    Hello,
    Published,
    Pulse,
    Refused,
    Resume,
    StopRequest,
    Trained,
    Welcome,
)
from gspo_services.broker.ledger.actions import SessionKey
from gspo_services.broker.ledger.fencing import LEARNER_LEASE_S
from tests.support.broker.ledger import LEARNER, LedgerHarness, config_with, delivered, replies
from tests.support.broker.ledger_training import R1, generate, group_ids, harness, train_one
from tests.support.broker.peers import VOCABULARY


def test_a_restarted_learner_gets_the_batches_since_its_checkpoint_again_and_new_ones_after() -> None:
    world = harness(num_batches=6)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    world.send(LEARNER, Checkpointed(next_batch=1, policy_version=2))
    generate(world, 4, 2)
    train_one(world, 1, 2)
    generate(world, 4, 3)
    assert delivered(world.request_batch(2, 3)) == [2]
    content = [group_ids(world, index) for index in (1, 2)]
    reborn = SessionKey("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    (welcome,) = replies(world.hello(reborn, "learner"), Welcome)
    assert (welcome.next_batch, welcome.policy_version) == (1, 3)
    assert replies(world.send(reborn, Resume(next_batch=1)), Refused) == []
    assert (welcome.trained_batches, welcome.weights_digest) == (2, "d-2")
    assert delivered(world.request_batch(1, 0, reborn)) == [1]
    assert [group_ids(world, index) for index in (1, 2)] == content
    (refused,) = replies(world.publish(4, 1, reborn), Refused)
    assert "version 3 was trained on 2: train the batches between again first" in refused.reason
    assert replies(world.publish(3, 2, reborn), Refused) == []
    assert world.ledger.state.batches.next_version == 4, "a restart alone changes no version"
    assert world.ledger.state.num_dropped == {}
    assert delivered(world.request_batch(2, 3, reborn)) == [2]
    world.publish(4, 3, reborn)
    generate(world, 4, 4)
    assert delivered(world.request_batch(3, 4, reborn)) == [3]


def test_a_former_learner_is_fenced_off_for_good() -> None:
    world = harness()
    world.tick(LEARNER_LEASE_S)
    world.hello(SessionKey("learner", "second"), "learner")
    (refused,) = replies(world.request_batch(0, 1), Refused)
    assert refused.reason.startswith("unknown session")
    (fatal,) = replies(world.hello(LEARNER, "learner"), Refused)
    assert fatal.fatal
    assert "was replaced by a newer one" in fatal.reason


def test_a_second_learner_changes_nothing_for_the_first_one_which_lives_while_it_trains() -> None:
    world = harness()
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    second = SessionKey("learner", "second")
    for _ in range(12):
        world.tick(1.0)
        (pulse,) = replies(world.send(LEARNER, Heartbeat(policy_version=1, status="serving", leases=[])), Pulse)
        assert pulse.policy_version == 1
        (refused,) = replies(world.hello(second, "learner"), Refused)
        assert not refused.fatal
        assert f"session {LEARNER.tag} (learner) has this run and was heard 0.0 s ago" in refused.reason
    status = world.ledger.status(world.now)
    assert (status["learner_session"], status["learner_silent_s"], status["learner_waiting"]) == (
        LEARNER.tag,
        0.0,
        second.tag,
    )
    later = world.ledger.status(world.now + LEARNER_LEASE_S)
    assert (later["learner_silent_s"], later["learner_waiting"]) == (LEARNER_LEASE_S, None), "it has asked no more"
    assert replies(world.trained(0, 1), Refused) == []
    assert replies(world.publish(2, 1), Refused) == []
    world.restart()
    (refused,) = replies(world.hello(second, "learner"), Refused)
    assert not refused.fatal
    assert replies(world.hello(LEARNER, "learner"), Welcome)


def test_a_learner_that_says_goodbye_leaves_the_run_to_the_next_one_also_under_another_broker() -> None:
    world = harness()
    world.send(LEARNER, Goodbye())
    world.restart()
    assert replies(world.hello(SessionKey("learner", "second"), "learner"), Welcome)


def test_a_checkpoint_of_another_run_is_refused_for_good() -> None:
    world = harness()
    generate(world, 4, 1)
    train_one(world, 0, 1)
    world.send(LEARNER, Checkpointed(next_batch=1, policy_version=2))
    world.restart()
    world.tick(LEARNER_LEASE_S)
    reborn = SessionKey("learner", "b")
    world.hello(reborn, "learner")
    (refused,) = replies(world.send(reborn, Resume(next_batch=2)), Refused)
    assert refused.fatal
    assert "this run has assembled 1: checkpoint and ledger belong to different runs" in refused.reason


def test_a_learner_may_go_back_to_an_older_checkpoint_and_gets_the_batches_since_again() -> None:
    world = harness(num_batches=6)
    for index in range(4):
        generate(world, 4, index + 1)
        train_one(world, index, index + 1)
    world.send(LEARNER, Checkpointed(next_batch=4, policy_version=5))
    content = [group_ids(world, index) for index in range(4)]
    reborn = SessionKey("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    world.hello(reborn, "learner")
    assert replies(world.send(reborn, Resume(next_batch=1)), Refused) == []
    world.restart()
    world.hello(reborn, "learner")
    assert world.ledger.state.batches.checkpointed == 1, "it is durable"
    for index in (1, 2):
        assert delivered(world.request_batch(index, 0, reborn)) == [index]
        assert replies(world.trained(index, 0, reborn), Refused) == []
    assert [group_ids(world, index) for index in range(4)] == content
    assert [(line["batch"], line["again"]) for line in world.lines if line["event"] == "batch"][4:] == [(1, True), (2, True)]
    world.send(reborn, Checkpointed(next_batch=3, policy_version=0))
    assert world.ledger.state.batches.checkpointed == 3
    world.send(reborn, Resume(next_batch=1))
    assert world.ledger.state.batches.checkpointed == 3, "a Resume that was overtaken changes nothing"
    assert delivered(world.request_batch(3, 0, reborn)) == [3]
    assert world.ledger.state.batches.next_version == 5
    assert world.ledger.state.num_dropped == {}


def test_batches_that_only_the_store_remembers_are_trained_again_without_a_second_line() -> None:
    world = harness(num_batches=6)
    for index in range(4):
        generate(world, 4, index + 1)
        train_one(world, index, index + 1)
    world.send(LEARNER, Checkpointed(next_batch=4, policy_version=5))
    lines = len(world.lines)
    world.send(LEARNER, Resume(next_batch=4))
    reborn = SessionKey("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    world.hello(reborn, "learner")
    world.send(reborn, Resume(next_batch=1))
    assert delivered(world.request_batch(1, 0, reborn)) == [1]
    assert replies(world.trained(1, 0, reborn), Refused) == []
    assert len(world.lines) == lines
    (refused,) = replies(world.trained(3, 0, reborn), Refused)
    assert "policy_version is 0: batch 3 makes a version" in refused.reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Trained(index=0, policy_version=1, metrics={}), "only 0 batches exist"),
        (Checkpointed(next_batch=1, policy_version=1), "only 0 batches exist"),
        (
            Published(
                policy_version=2, endpoint="ipc://w", digest="d-2", num_bytes=1, trained_batches=1, vocabulary=VOCABULARY
            ),
            "only 0 batches exist",
        ),
        (BatchRequest(index=1, policy_version=1), "0 is the next new one"),
    ],
)
def test_a_learner_that_is_ahead_of_the_ledger_is_refused(message: Any, reason: str) -> None:
    (refused,) = replies(harness().send(LEARNER, message), Refused)
    assert refused.fatal
    assert reason in refused.reason


def test_another_protocol_version_is_refused_and_both_are_named() -> None:
    world = harness()
    hello = Hello(protocol_version=PROTOCOL_VERSION + 1, role="rollout", peer="new", session="s")
    (refused,) = replies(world.ledger.on_hello(hello, world.now), Refused)
    assert refused.fatal
    assert f"protocol_version is {PROTOCOL_VERSION + 1}, this broker speaks {PROTOCOL_VERSION}" in refused.reason


def test_a_process_of_another_run_takes_nobodys_place() -> None:
    world = harness()
    assert world.ledger.peers.get(R1) is not None
    hello = Hello(protocol_version=PROTOCOL_VERSION, role="rollout", peer=R1.peer, session="other", fingerprint="another")
    (refused,) = replies(world.ledger.on_hello(hello, world.now), Refused)
    assert refused.fatal
    assert f"fingerprint {world.config.fingerprint}, sent was another" in refused.reason
    assert "[agent] and [batch] must be the same everywhere" in refused.reason
    assert world.ledger.peers.get(R1) is not None
    assert world.ledger.peers.get(SessionKey(R1.peer, "other")) is None


def test_a_message_that_a_role_does_not_send_is_refused() -> None:
    (refused,) = replies(harness().send(R1, StopRequest(reason="mine now")), Refused)
    assert refused.reason == "stop_request: not expected from a rollout"


def test_a_run_keeps_the_day_of_its_first_start_which_rollouts_are_told() -> None:
    world = LedgerHarness(config=config_with(begun_on="26 Jul 2024"))
    world.hello(LEARNER, "learner")
    world.config = config_with(begun_on="27 Jul 2024")
    world.restart()
    assert [welcome.begun_on for welcome in replies(world.hello(R1), Welcome)] == ["26 Jul 2024"]
