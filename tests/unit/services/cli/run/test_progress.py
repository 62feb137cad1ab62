"""When a run will end, how long its answers are, which evaluation was the best."""

from typing import Any

import pytest

from gspo_services.cli.run.progress import RunProgress, duration


def a_row(batch: int, time_s: float, **fields: Any) -> dict[str, Any]:
    return {"event": "batch", "batch": batch, "time_s": time_s, **fields}


def left(progress: RunProgress, done: int, total: int = 60) -> float | None:
    return progress.seconds_left({"batches_trained": done, "batches_total": total})


def test_the_end_is_told_from_the_usual_time_of_a_batch() -> None:
    progress = RunProgress()
    progress.take([a_row(0, 100.0), a_row(1, 104.0)])
    assert left(progress, 2) is None, "one step says nothing"
    progress.take([a_row(2, 108.0), a_row(3, 512.0), a_row(4, 516.0)])
    assert left(progress, 5) == 4.0 * 55, "one long pause does not count"
    assert left(progress, 60) is None


def test_a_batch_that_is_trained_again_does_not_count() -> None:
    progress = RunProgress()
    progress.take([a_row(0, 0.0), a_row(1, 3.0), a_row(1, 90.0), a_row(1, 190.0), a_row(2, 193.0)])
    assert left(progress, 3, 4) == 3.0


def test_only_recent_batches_say_how_fast_it_goes() -> None:
    progress = RunProgress()
    progress.take([a_row(index, 10.0 * index) for index in range(50)])
    progress.take([a_row(50 + index, 500.0 + index) for index in range(21)])
    assert left(progress, 71, 81) == 10.0


def test_the_best_evaluation_is_remembered_with_its_batch() -> None:
    progress = RunProgress()
    rewards = [(0, 0.1), (5, 0.8), (10, 0.8), (15, None), (20, 0.3)]
    line = {"event": "eval", "policy_version": 1, "time_s": 1.0}
    progress.take([{**line, "batch": batch, "eval/reward": reward} for batch, reward in rewards])
    assert progress.best is not None
    assert (progress.best.reward, progress.best.batch) == (0.8, 5)


def test_lengths_are_those_of_the_last_batch_or_nothing() -> None:
    progress = RunProgress()
    assert progress.lengths() == ""
    lengths = {"length/mean": 12.4, "length/p95": 20, "length/max": 30, "length/cut_off": 0.125}
    progress.take([a_row(0, 1.0, **lengths)])
    assert progress.lengths() == "12 mean, 20 p95, 30 longest; 12 % cut off"
    progress.take([a_row(1, 2.0)])
    assert progress.lengths() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.0, "99 s"), (101.0, "2 min"), (5940.0, "99 min"), (7200.0, "2.0 h"), (200_000.0, "2.3 days")],
)
def test_durations_are_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text
