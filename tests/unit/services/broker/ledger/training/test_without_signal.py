"""A run that has nothing to learn from stops, and says so; whatever restarts come between."""

from typing import Any

from gspo_protocol.messages import EndOfRun, Goodbye, Trained
from gspo_services.shared.learning import is_silent
from tests.support.broker.ledger import LEARNER, LedgerHarness, replies
from tests.support.broker.ledger_training import R1, generate, harness


def train(world: LedgerHarness, index: int, *, signal: bool, reward: float = 0.0) -> list[Any]:
    """One step of the learner, which reports whether any answer had an advantage. Returns what a further request gets."""
    version = index + 1
    generate(world, 4, version, reward)
    world.request_batch(index, version)
    metrics = {
        "signal_sequences/all": 4.0 if signal else 0.0, "groups/all": 2.0, "reward_mean": reward,
        "reward_std": 0.5 if signal else 0.0,
    }  # fmt: skip
    world.send(LEARNER, Trained(index=index, policy_version=version, metrics=metrics))
    world.publish(version + 1, index + 1)
    return world.request_batch(index + 1, version + 1)


def restart(world: LedgerHarness) -> None:
    """Only the rows are left of the broker; its peers come back."""
    world.restart()
    world.hello(LEARNER, "learner")
    world.hello(R1)


def test_a_run_stops_after_so_many_batches_in_a_row_without_a_signal_and_fails() -> None:
    world = harness(num_batches=9, stop_without_signal_batches=3)
    for index, signal in enumerate((False, False, True, False, False)):
        train(world, index, signal=signal)
        assert not world.ledger.state.stop_reason
    (end,) = replies(train(world, 5, signal=False), EndOfRun)
    assert end.reason.startswith(
        "no answer of the last 3 batches had an advantage (run.stop_without_signal_batches = 3); in batch 5, every answer "
        "was wrong (reward 0), and some were right before. "
    )
    assert world.ledger.status(world.now)["error"] == end.reason
    assert world.ledger.state.finished


def test_the_count_outlives_the_broker_and_a_batch_that_is_trained_again_counts_once() -> None:
    world = harness(num_batches=9, stop_without_signal_batches=3)
    train(world, 0, signal=False)
    restart(world)
    train(world, 1, signal=False)
    line = {name: value for name, value in world.lines[-1].items() if isinstance(value, float)}
    world.send(LEARNER, Trained(index=1, policy_version=3, metrics=line))
    assert world.lines[-1]["again"]
    assert not world.ledger.state.stop_reason
    restart(world)
    assert replies(train(world, 2, signal=False), EndOfRun)
    world.restart()
    assert world.ledger.state.run.error


def test_a_run_that_is_started_again_after_such_a_stop_goes_on_for_as_many_batches() -> None:
    world = harness(num_batches=9, stop_without_signal_batches=2)
    train(world, 0, signal=False)
    assert replies(train(world, 1, signal=False), EndOfRun)
    world.send(LEARNER, Goodbye(reason="the run has ended"))
    world.end()
    restart(world)
    assert not world.ledger.state.stop_reason
    train(world, 2, signal=False)
    assert not world.ledger.state.stop_reason
    assert replies(train(world, 3, signal=False), EndOfRun)


def test_a_run_whose_tasks_are_solved_ends_without_an_error() -> None:
    world = harness(num_batches=9, stop_without_signal_batches=2)
    train(world, 0, signal=True, reward=1.0)
    train(world, 1, signal=False, reward=1.0)
    (end,) = replies(train(world, 2, signal=False, reward=1.0), EndOfRun)
    assert "every answer was right (reward 1)" in end.reason
    assert not world.ledger.state.run.error
    constant = harness(num_batches=9, stop_without_signal_batches=2)
    for index in range(2):
        train(constant, index, signal=False, reward=1.0)
    assert constant.ledger.state.run.error, "a reward that was 1 from the start on teaches nothing"


def test_zero_never_stops_and_the_last_batch_ends_the_run_anyway() -> None:
    for most in (0, 4):
        world = harness(num_batches=4, stop_without_signal_batches=most)
        for index in range(4):
            train(world, index, signal=False)
        assert world.ledger.state.end_reason == "all 4 batches are trained"


def test_the_recorded_lines_decide_alike() -> None:
    """A replay or an audit that counts the lines finds the batch at which the ledger has stopped."""
    world = harness(num_batches=9, stop_without_signal_batches=2)
    for index, signal in enumerate((False, True, False, False)):
        train(world, index, signal=signal)
    lines = [line for line in world.lines if line["event"] == "batch"]
    in_a_row = [all(map(is_silent, lines[max(0, at - 1) : at + 1])) for at in range(1, len(lines))]
    assert in_a_row.index(True) + 1 == lines[-1]["batch"] == world.ledger.state.batches.num_trained - 1


def test_lines_say_how_often_each_task_was_drawn() -> None:
    world = harness(num_batches=9, num_train_tasks=4)
    train(world, 0, signal=True)
    train(world, 1, signal=True)
    assert [(line["num_tasks"], line["data_passes"]) for line in world.lines] == [(4, 0.5), (4, 1.0)]
    endless = harness()
    train(endless, 0, signal=True)
    assert "num_tasks" not in endless.lines[-1]
