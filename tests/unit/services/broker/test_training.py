"""The learner's side of the ledger: batches, versions, checkpoints, evaluations, the end of the run."""

from typing import Any

import pytest

from protocol.limits import PROTOCOL_VERSION
from protocol.messages import (
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseEnded,
    Published,
    Pulse,
    Refused,
    Resume,
    Status,
    StatusRequest,
    StopRequest,
    Trained,
    Welcome,
)
from services.broker.actions import Action, Announce, GrantLease, Who
from services.broker.peers import LEARNER_LEASE_S
from tests.support.broker_ledger import LEARNER, LedgerHarness, chunk, config_with, delivered, granted, replies

R1 = Who("r1", "a")
OPERATOR = Who("operator", "a")


def harness(**changes: Any) -> LedgerHarness:
    """One rollout, a learner that has published version 1, an operator."""
    made = LedgerHarness(config_with(**changes))
    made.hello(LEARNER, "learner")
    made.hello(R1)
    made.hello(OPERATOR, "operator")
    made.publish(1, 0)
    return made


def generate(world: LedgerHarness, num_trajectories: int, version: int, reward: float = 1.0) -> list[GrantLease]:
    """So many whole episodes."""
    leases = world.lease(R1, num_trajectories, version)
    for lease in leases:
        world.episode(R1, lease, version, reward)
    return leases


def train_one(world: LedgerHarness, index: int, version: int) -> list[Action]:
    """Request, train, publish: one turn of the learner."""
    actions = world.request_batch(index, version)
    assert delivered(actions) == [index]
    world.trained(index, version)
    return world.publish(version + 1, index + 1)


def group_ids(world: LedgerHarness, index: int) -> tuple[int, ...]:
    return world.store.batch(index)[0].group_ids


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
    reborn = Who("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    world.hello(reborn, "learner")
    world.publish(3, 0, reborn)
    assert delivered(world.request_batch(0, 3, reborn)) == [0]
    assert delivered(world.request_batch(1, 4, reborn)) == [1]
    assert (world.store.batch(1)[0].policy_version, group_ids(world, 1)) == (2, content)
    assert world.ledger.state.batches.next_version == 5


def test_a_publication_is_a_hint_to_every_rollout() -> None:
    world = harness()
    (hint,) = [action for action in world.publish(2, 0) if isinstance(action, Announce)]
    assert isinstance(hint.message, Pulse)
    assert (hint.message.policy_version, hint.message.weights_endpoint) == (2, "tcp://w")


def test_a_version_is_never_reused_but_may_be_delivered_again() -> None:
    world = harness()
    world.publish(2, 0)
    world.restart()
    world.hello(LEARNER, "learner")
    assert replies(world.publish(1, 0), Refused) == []
    assert replies(world.publish(2, 0), Refused) == []
    other = Published(policy_version=2, endpoint="tcp://w", digest="other", num_bytes=1, trained_batches=0)
    (refused,) = replies(world.send(LEARNER, other), Refused)
    assert refused.fatal
    assert "versions are never reused; publish 3" in refused.reason
    assert world.ledger.state.batches.newest_version == 2


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
    reborn = Who("learner-2", "b")
    world.tick(LEARNER_LEASE_S)
    (welcome,) = replies(world.hello(reborn, "learner"), Welcome)
    assert (welcome.next_batch, welcome.policy_version) == (1, 3)
    assert replies(world.send(reborn, Resume(next_batch=1)), Refused) == []
    world.publish(4, 1, reborn)
    assert delivered(world.request_batch(1, 4, reborn)) == [1]
    assert [group_ids(world, index) for index in (1, 2)] == content
    assert world.ledger.state.batches.next_version == 6, "two batches are trained again before the next new one"
    world.publish(5, 2, reborn)
    assert delivered(world.request_batch(2, 5, reborn)) == [2]
    world.publish(6, 3, reborn)
    generate(world, 4, 6)
    assert delivered(world.request_batch(3, 6, reborn)) == [3]


def test_a_former_learner_is_fenced_off_for_good() -> None:
    world = harness()
    world.tick(LEARNER_LEASE_S)
    world.hello(Who("learner", "second"), "learner")
    (refused,) = replies(world.request_batch(0, 1), Refused)
    assert refused.reason.startswith("unknown session")
    (fatal,) = replies(world.hello(LEARNER, "learner"), Refused)
    assert fatal.fatal
    assert "was replaced by a newer one" in fatal.reason


def test_a_second_learner_changes_nothing_for_the_first_one_which_lives_while_it_trains() -> None:
    world = harness()
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    second = Who("learner", "second")
    for _ in range(12):
        world.tick(1.0)
        assert world.send(LEARNER, Heartbeat(policy_version=1, status="serving", leases=[])) == []
        (refused,) = replies(world.hello(second, "learner"), Refused)
        assert not refused.fatal
        assert "session first (learner) has this run and was heard 0.0 s ago" in refused.reason
    status = world.ledger.status(world.now)
    assert (status["learner_session"], status["learner_silent_s"], status["learner_waiting"]) == ("first", 0.0, "second")
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
    assert replies(world.hello(Who("learner", "second"), "learner"), Welcome)


@pytest.mark.parametrize(
    ("next_batch", "reason"),
    [(0, "1 are settled by a newer one"), (2, "this run has assembled 1: checkpoint and ledger belong to different runs")],
)
def test_a_wrong_checkpoint_is_refused_for_good(next_batch: int, reason: str) -> None:
    world = harness()
    generate(world, 4, 1)
    train_one(world, 0, 1)
    world.send(LEARNER, Checkpointed(next_batch=1, policy_version=2))
    world.restart()
    world.tick(LEARNER_LEASE_S)
    reborn = Who("learner", "b")
    world.hello(reborn, "learner")
    (refused,) = replies(world.send(reborn, Resume(next_batch=next_batch)), Refused)
    assert refused.fatal
    assert reason in refused.reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Trained(index=0, policy_version=1, metrics={}), "only 0 batches exist"),
        (Checkpointed(next_batch=1, policy_version=1), "only 0 batches exist"),
        (Published(policy_version=2, endpoint="e", digest="d", num_bytes=1, trained_batches=1), "only 0 batches exist"),
        (BatchRequest(index=1, policy_version=1), "0 is the next new one"),
    ],
)
def test_a_learner_that_is_ahead_of_the_ledger_is_refused(message: Any, reason: str) -> None:
    (refused,) = replies(harness().send(LEARNER, message), Refused)
    assert refused.fatal
    assert reason in refused.reason


def test_a_version_jump_drops_what_became_too_old_and_records_its_lengths() -> None:
    world = harness(max_lag=1, num_batches=6)
    leases = world.lease(R1, 8, 1)
    for lease in leases[:5]:
        world.episode(R1, lease, 1, num_tokens=3 + lease.trajectory_id)
    world.publish(2, 0)  # a learner that restarts publishes again without training
    world.publish(3, 0)
    dropped = [line for line in world.lines if line["event"] == "dropped"]
    assert [(line["group_id"], line["reason"], line["num_tokens"]) for line in dropped] == [
        (0, "stale", [3, 4]),
        (1, "stale", [5, 6]),
        (2, "stale", [7, 0]),
    ]
    assert dropped[2]["finished"] == [True, False]
    assert world.ledger.state.num_dropped == {"stale": 3}
    row = world.ledger.state.groups.trajectory(leases[6].trajectory_id)
    assert row is not None, "nothing old was generated in group 3"
    assert row.status == "free", "but its engine might still"
    generate(world, 8, 3)
    assert delivered(world.request_batch(0, 3)) == [0]
    assert world.ledger.state.batches.batch(0).stats.max_lag == 0  # type: ignore[union-attr]


def test_a_version_jump_takes_back_old_leases_and_keeps_what_is_young_enough() -> None:
    world = harness(max_lag=1, num_batches=6)
    updated, silent = world.lease(R1, 2, 1)
    world.publish(2, 0)
    world.grow(R1, updated, 3, 2)  # its engine has shown that it serves version 2
    ended = replies(world.publish(3, 0), LeaseEnded)
    assert [(end.trajectory_id, end.reason) for end in ended] == [
        (silent.trajectory_id, "granted at version 1, 2 is the oldest allowed")
    ]
    assert world.ledger.state.num_dropped == {}
    assert replies(world.grow(R1, updated, 3, 2), LeaseEnded) == []


def test_a_token_older_than_its_engine_said_is_caught_before_it_is_trained_on() -> None:
    world = harness(max_lag=0, num_batches=6)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    lying, *honest = world.lease(R1, 4, 2)
    world.send(R1, chunk(lying, 0, 3, 1))
    world.finish(R1, lying, 3)
    for lease in honest:
        world.episode(R1, lease, 2)
    assert delivered(world.request_batch(1, 2)) == []
    assert world.ledger.state.num_dropped == {"stale": 1}
    generate(world, 2, 2)
    assert delivered(world.request_batch(1, 2)) == [1]
    assert lying.group_id not in group_ids(world, 1)


def test_the_record_of_a_batch_has_the_learners_metrics_and_the_ledgers() -> None:
    world = harness(max_lag=1, num_batches=6)
    world.episode(R1, *(lease for lease in world.lease(R1, 1, 1)), 1, reward=1.0, num_tokens=4)
    for reward in (0.0, 0.5, 0.5):
        (lease,) = world.lease(R1, 1, 1)
        world.episode(R1, lease, 1, reward, num_tokens=2)
    world.request_batch(0, 1)
    metrics = {"loss": float("nan"), "grad_norm": 2.0}
    world.send(LEARNER, Trained(index=0, policy_version=1, metrics=metrics))
    (line,) = world.lines
    assert (line["event"], line["batch"], line["policy_version"], line["again"]) == ("batch", 0, 1, False)
    assert (line["train/reward"], line["num_tokens"], line["num_uniform_groups"]) == (0.5, 10, 1)
    assert (line["lag/mean"], line["lag/max"], line["loss"], line["grad_norm"]) == (0.0, 0, None, 2.0)
    world.send(LEARNER, Trained(index=0, policy_version=1, metrics=metrics))
    assert len(world.lines) == 1, "delivered again"
    world.publish(2, 0)
    world.send(LEARNER, Trained(index=0, policy_version=2, metrics=metrics))
    assert [line["again"] for line in world.lines] == [False, True]


def test_lag_is_the_mean_over_action_tokens_and_then_over_trajectories() -> None:
    world = harness(max_lag=1, num_batches=6, groups_per_batch=1)
    leases = world.lease(R1, 4, 1)
    for lease in leases[:2]:
        world.episode(R1, lease, 1)
    world.grow(R1, leases[2], 6, 1)
    train_one(world, 0, 1)
    world.grow(R1, leases[2], 2, 2)
    world.finish(R1, leases[2], 8)
    world.episode(R1, leases[3], 2, num_tokens=1)
    world.request_batch(1, 2)
    stats = world.ledger.state.batches.batch(1).stats  # type: ignore[union-attr]
    assert (stats.mean_lag, stats.max_lag) == ((6 / 8 + 0) / 2, 1)


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
    assert len(world.lease(R1, 4, 2)) == 4, "starting again goes on"


def test_a_waiting_learner_is_told_of_a_stop_at_once() -> None:
    world = harness()
    world.request_batch(0, 1)
    (end,) = replies(world.send(OPERATOR, StopRequest(reason="enough")), EndOfRun)
    assert end.index == 0


def test_held_out_tasks_are_evaluated_first_at_their_version_and_reported_with_failures_apart() -> None:
    world = harness(evaluate_every_batches=2, num_eval_tasks=3, max_attempts=1)
    leases = world.lease(R1, 4, 1)
    assert [(lease.split, lease.task_index) for lease in leases[:3]] == [("eval", 0), ("eval", 1), ("eval", 2)]
    assert leases[3].split == "train"
    world.episode(R1, leases[0], 1, reward=1.0)
    world.fail(R1, leases[1])
    assert world.lines == []
    world.episode(R1, leases[2], 1, reward=0.0)
    (line,) = world.lines
    expected = {
        "event": "eval",
        "eval/reward": 0.5,
        "policy_version": 1,
        "batch": 0,
        "num_finished": 2,
        "num_failed": 1,
    }
    assert line == expected
    assert world.ledger.state.num_dropped == {}


def test_an_evaluation_waits_for_engines_that_serve_its_version() -> None:
    world = harness(evaluate_every_batches=1, num_eval_tasks=1, num_batches=3)
    generate(world, 1, 1)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    assert {lease.split for lease in world.lease(R1, 1, 1)} == {"train"}
    assert [lease.split for lease in world.lease(R1, 1, 2)] == ["eval"]


def test_evaluations_follow_their_interval_and_survive_restarts() -> None:
    world = harness(evaluate_every_batches=2, num_eval_tasks=1, num_batches=5)
    version = 1
    for index in range(5):
        generate(world, 1, version)
        world.restart()
        for who, role in ((R1, "rollout"), (LEARNER, "learner")):
            world.hello(who, role)  # type: ignore[arg-type]
        generate(world, 4, version)
        train_one(world, index, version)
        version += 1
    assert replies(world.request_batch(5, version), EndOfRun) == []
    assert not world.ledger.state.finished
    pending = replies(world.tick(2.0), BatchPending)[-1]
    assert pending.waiting_for == "evaluation of version 6: 0 of 1 tasks done"
    (lease,) = world.lease(R1, 4, version)
    assert lease.split == "eval"
    world.grow(R1, lease, 3, version)
    assert len(replies(world.finish(R1, lease, 3), EndOfRun)) == 1
    assert [(line["batch"], line["policy_version"]) for line in world.lines if line["event"] == "eval"] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (5, 6),
    ]
    assert world.ledger.state.finished


def test_an_open_evaluation_is_not_interrupted_by_a_due_one_but_the_last_one_happens() -> None:
    world = harness(evaluate_every_batches=1, num_eval_tasks=1, num_batches=2)
    (held_out,) = world.lease(R1, 1, 1)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    generate(world, 4, 2)
    train_one(world, 1, 2)
    world.episode(R1, held_out, 1)
    (last,) = world.lease(R1, 2, 3)
    world.episode(R1, last, 3)
    assert [(line["batch"], line["policy_version"]) for line in world.lines if line["event"] == "eval"] == [(0, 1), (2, 3)]


def test_status_says_how_the_run_stands() -> None:
    world = harness(num_batches=3)
    generate(world, 5, 1, reward=0.5)
    world.now += 7.0
    assert world.ledger.status(world.now)["quiet_s"] == 7.0
    train_one(world, 0, 1)
    world.send(R1, Heartbeat(policy_version=2, status="serving", leases=[], metrics={"tokens_per_s": 7.0}))
    world.now += 1.5
    (answer,) = replies(world.send(OPERATOR, StatusRequest()), Status)
    status = answer.status
    assert (status["batches_trained"], status["batches_assembled"], status["batches_total"]) == (1, 1, 3)
    assert (status["policy_version"], status["train_reward"], status["lag_mean"]) == (2, 0.5, 0.0)
    assert status["groups"] == {"open": 1, "complete": 0, "batched": 2, "dropped": 0}
    (rollout,) = status["rollouts"]
    assert (rollout["peer"], rollout["status"], rollout["policy_version"], rollout["silent_s"]) == ("r1", "serving", 2, 1.5)
    assert rollout["metrics"] == {"tokens_per_s": 7.0}
    assert status["waiting_for"].startswith("2 more complete groups")
    assert (status["finished"], status["error"], status["learner"]) == (False, "", "learner")
    assert status["quiet_s"] == 1.5


@pytest.mark.parametrize("in_order", [True, False])
def test_what_a_learner_that_is_gone_asked_for_is_given_to_nobody(in_order: bool) -> None:
    world = harness()
    world.request_batch(0, 1)
    if in_order:
        world.send(LEARNER, Goodbye())
    else:
        world.tick(LEARNER_LEASE_S)
        world.hello(Who("learner", "next"), "learner")
    generate(world, 4, 1)
    world.tick()
    status = world.ledger.status(world.now)
    assert (status["batches_assembled"], status["waiting_for"]) == (0, "the learner to ask for the next batch")


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
    assert world.ledger.peers.get(R1) is not None
    assert world.ledger.peers.get(Who(R1.peer, "other")) is None


def test_a_message_that_a_role_does_not_send_is_refused() -> None:
    (refused,) = replies(harness().send(R1, StopRequest(reason="mine now")), Refused)
    assert refused.reason == "stop_request: not expected from a rollout"


def test_granted_work_follows_the_newest_version_only_inside_the_window() -> None:
    world = harness(max_lag=0, num_batches=6)
    generate(world, 4, 1)
    world.request_batch(0, 1)
    assert granted(world.tick()) == []
    assert world.lease(R1, 4, 1) == [], "the batch is assembled, its publication is not there yet"
    world.trained(0, 1)
    world.publish(2, 1)
    assert len(world.lease(R1, 4, 2)) == 4


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


def test_a_stop_that_was_not_carried_out_is_for_the_next_broker_to_go_on_with() -> None:
    world = harness()
    generate(world, 4, 1)
    assert delivered(world.request_batch(0, 1)) == [0]
    world.send(OPERATOR, StopRequest(reason="enough"))
    world.send(LEARNER, Goodbye())
    world.end()
    assert "enough" in world.restored().state.stop_reason, "batch 0 is assembled and not trained"
