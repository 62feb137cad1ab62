"""Evaluations on held-out tasks: when, at which version, and that none is lost."""

import pytest

from gspo_protocol.messages import BatchPending, EndOfRun, Evaluated, Resume, VersionScore
from tests.support.broker.ledger import LEARNER, replies
from tests.support.broker.ledger_training import R1, generate, harness, train_one


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
        "eval/reward_error": 0.5,
        "eval/versions_newer": 0.0,
        "eval/length/mean": line["eval/length/max"],
        "eval/length/p95": line["eval/length/max"],
        "eval/length/max": line["eval/length/max"],
        "eval/length/cut_off": 0.0,
    }
    assert line == expected
    assert world.ledger.state.num_dropped == {}


def test_an_evaluation_says_how_much_newer_its_tokens_are() -> None:
    world = harness(evaluate_every_batches=2, num_eval_tasks=2, num_batches=5)
    held_out = world.lease(R1, 2, 1)
    generate(world, 4, 1)
    train_one(world, 0, 1)
    generate(world, 4, 2)
    train_one(world, 1, 2)
    world.episode(R1, held_out[0], 1, num_tokens=2)
    world.episode(R1, held_out[1], 3, num_tokens=6)
    assert world.lines[-1]["policy_version"] == 1
    assert world.lines[-1]["eval/versions_newer"] == pytest.approx(5 / 3), "5 of 6 sampled tokens are two versions newer"


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
        for sender, role in ((R1, "rollout"), (LEARNER, "learner")):
            world.hello(sender, role)  # type: ignore[arg-type]
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


def test_the_learner_hears_of_each_evaluation_and_after_a_resume_of_all() -> None:
    world = harness(evaluate_every_batches=1, num_eval_tasks=1, num_batches=2, max_attempts=1)
    (first,) = world.lease(R1, 1, 1)
    world.grow(R1, first, 3, 1)
    ended = replies(world.finish(R1, first, 3, 0.25), Evaluated)
    assert ended == [Evaluated(scores=[VersionScore(1, False, 0.25)])]
    generate(world, 4, 1)
    begun = replies(train_one(world, 0, 1), Evaluated)
    assert begun == [Evaluated(scores=[VersionScore(2, True, None)])]
    (second,) = world.lease(R1, 1, 2)
    assert replies(world.fail(R1, second), Evaluated) == [Evaluated(scores=[VersionScore(2, False, None)])]
    world.restart()
    world.hello(LEARNER, "learner")
    (told,) = replies(world.send(LEARNER, Resume(next_batch=0)), Evaluated)
    assert told.scores == [VersionScore(2, False, None), VersionScore(1, False, 0.25)]
