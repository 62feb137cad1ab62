"""Everything that the ledger says can be read by whom it is said to, however long what it was told is.

``LedgerHarness`` sends each answer through the codec.
"""

import pytest

from gspo_protocol import limits
from gspo_protocol.messages import (
    BatchFailed,
    BatchPending,
    BatchRequest,
    EndOfRun,
    Goodbye,
    Hello,
    LeaseEnded,
    LeaseRequest,
    Message,
    Refused,
    Release,
    SkipBatch,
    Status,
    StatusRequest,
    StopRequest,
)
from gspo_services.broker.ledger.actions import Action, SessionKey
from tests.support.broker.ledger import LEARNER, LedgerHarness, chunk, config_with, replies

LONG = "x" * limits.MAX_REASON_CHARS
NAME = "n" * (limits.MAX_NAME_CHARS - 2)
ROLLOUTS = [SessionKey(f"{NAME}{number:02}", "s" * limits.MAX_NAME_CHARS) for number in range(12)]
OPERATOR = SessionKey(NAME + "op", "s" * limits.MAX_NAME_CHARS)


def harness(**changes: object) -> LedgerHarness:
    world = LedgerHarness(config_with(**changes))
    world.hello(LEARNER, "learner")
    world.hello(OPERATOR, "operator")
    for rollout in ROLLOUTS:
        world.hello(rollout)
    world.publish(1, 0)
    return world


def the(kind: type[Message], actions: list[Action]) -> str:
    """The text of the one message of a type among actions."""
    (message,) = replies(actions, kind)
    text = getattr(message, "reason", None)
    assert isinstance(text, str)
    assert len(text) <= limits.MAX_REASON_CHARS
    return text


def test_the_end_of_a_run_that_was_stopped_with_a_long_reason_reaches_its_learner() -> None:
    world = harness()
    world.request_batch(0, 1)
    text = the(EndOfRun, world.send(OPERATOR, StopRequest(reason=LONG)))
    assert text.startswith(f"stopped by {OPERATOR.peer}: xxx")
    assert text.endswith("x...")
    (status,) = replies(world.send(OPERATOR, StatusRequest()), Status)
    assert status.status["stopping"] == text
    world.restart()
    world.hello(LEARNER, "learner")
    assert the(EndOfRun, world.request_batch(0, 1)) == text


def test_the_end_of_a_run_whose_episodes_fail_with_long_reasons_reaches_its_learner() -> None:
    world = harness(max_attempts=1, failure_budget=1)
    world.request_batch(0, 1)
    (lease,) = world.lease(ROLLOUTS[0])
    release = Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason=LONG, failed=True)
    assert "because of: xxx" in the(EndOfRun, world.send(ROLLOUTS[0], release))


def test_the_groups_that_a_batch_waits_for_may_be_in_hands_with_long_names() -> None:
    world = harness(max_lag=0, group_size=len(ROLLOUTS), groups_per_batch=1)
    for rollout in ROLLOUTS:
        world.lease(rollout)
    world.request_batch(0, 1)
    (pending,) = replies(world.tick(2.0), BatchPending)[-1:]
    assert len(pending.waiting_for) <= limits.MAX_REASON_CHARS


def test_a_batch_that_is_quarantined_with_a_long_reason_is_skipped_with_it() -> None:
    world = harness(group_size=1, groups_per_batch=1)
    (lease,) = world.lease(ROLLOUTS[0])
    world.episode(ROLLOUTS[0], lease, 1)
    learner = LEARNER
    for life in range(4):
        actions = world.request_batch(0, 1 + life, learner)
        if replies(actions, SkipBatch):
            break
        world.send(learner, BatchFailed(index=0, reason=LONG, raised=True))
        world.send(learner, Goodbye())
        learner = SessionKey("learner", f"life {life}")
        world.hello(learner, "learner")
        world.publish(2 + life, 0, learner)
    assert "xxx" in the(SkipBatch, actions)


def test_what_is_refused_is_named_within_the_limit() -> None:
    world = harness()
    (lease,) = world.lease(ROLLOUTS[0])
    actions = world.send(ROLLOUTS[0], chunk(lease, 7, 3, 1))
    assert "gap" in the(Refused, actions)
    assert "gap" in the(LeaseEnded, actions)
    assert the(Refused, world.send(ROLLOUTS[0], LeaseRequest(request_id=1, capacity=4096, policy_version=9)))
    assert the(Refused, world.send(LEARNER, BatchRequest(index=2**53, policy_version=1)))
    other = Hello(
        protocol_version=limits.PROTOCOL_VERSION, role="learner", peer=NAME, session="t", fingerprint=LONG[: len(NAME)]
    )
    assert the(Refused, world._carry_out(world.ledger.on_hello(other, world.now), {}))


@pytest.mark.parametrize("reason", [LONG, "\x00" * 4096, "\U0001f600" * 4096, '"\\' * 2048])
def test_a_status_can_be_read_whatever_a_run_was_stopped_for(reason: str) -> None:
    world = harness()
    world.send(OPERATOR, StopRequest(reason=reason))
    (status,) = replies(world.send(OPERATOR, StatusRequest()), Status)
    assert len(status.status["rollouts"]) == len(ROLLOUTS)
