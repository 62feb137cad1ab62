"""Whether a run learned, with intervals that are right at 0 of n."""

import math
from typing import Any

import pytest

from gspo_services.shared.eval_metrics import Interval, change_interval, share_from, share_interval
from gspo_services.shared.learning import LearningOutcome, LearningWatch
from tests.support.runs.learning_lines import a_batch, an_evaluation, recorded


def wilson(hits: int, number: int) -> Interval:
    return share_interval([1.0] * hits + [0.0] * (number - hits), number)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_change_of_two_shares_is_that_of_newcombe_1998_table_2(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    found = change_interval(wilson(*other), wilson(*one))
    assert found is not None
    assert found.low == pytest.approx(low, abs=6e-5)
    assert found.high == pytest.approx(high, abs=6e-5)


@pytest.mark.parametrize(("before", "after"), [(0.002, 0.002), (0.05, 0.05), (0.05, 0.3), (0.3, 0.4), (0.2, 0.8)])
def test_the_change_of_two_evaluations_is_covered_about_as_often_as_it_says(before: float, after: float) -> None:
    number = 20
    ends = [
        share_from(hits / number, math.sqrt(hits / number * (1 - hits / number) / (number - 1)), number)
        for hits in range(number + 1)
    ]
    covered = 0.0
    for hits, one in enumerate(ends):
        for later, other in enumerate(ends):
            found = change_interval(one, other)
            assert found is not None
            assert found.low is not None
            assert found.high is not None
            if found.low <= after - before <= found.high:
                chances = math.comb(number, hits) * before**hits * (1 - before) ** (number - hits)
                covered += chances * math.comb(number, later) * after**later * (1 - after) ** (number - later)
    assert covered >= 0.93


@pytest.mark.parametrize(
    "values", [[0.0] * 9, [1.0] * 9, [0.0] * 5 + [1.0] * 4, [0.0, 0.5, 0.5, 0.25, 1.0], [-1.0, 2.0, 0.5]]
)
def test_a_mean_and_its_error_give_the_interval_of_the_tasks_they_came_from(values: list[float]) -> None:
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    found = share_from(mean, error, len(values))
    if all(0 <= value <= 1 for value in values):
        assert tuple(found) == pytest.approx(tuple(share_interval(values, len(values))), abs=1e-9)
    else:
        assert found.high == pytest.approx(mean + 4.303 * error)


def test_a_rounded_error_is_still_that_of_right_and_wrong_answers() -> None:
    whole = wilson(3, 8)
    for error in (0.18298, 0.18299):
        assert tuple(share_from(3 / 8, error, 8)) == pytest.approx(tuple(whole)), "and not Student's t"


def outcome(*rows: dict[str, Any], tasks: Any = None) -> LearningOutcome:
    watch = LearningWatch()
    for row in rows:
        watch.take(row)
    return watch.outcome(tasks)


def test_the_last_line_of_real_runs() -> None:
    assert outcome(*recorded("learns_arithmetic")).text == (
        "learned: 0.266 -> 0.953 (change +0.688, 95 %: +0.590 to +0.761; "
        "held-out reward after 0 and 40 batches, 128 answers)"
    )
    assert outcome(*recorded("gold")).text == "no: the reward was 0 in all 640 answers of 10 batches"
    assert outcome(*recorded("lr_huge")).kind == "worse"
    assert outcome(*recorded("lr_tiny")).kind == "unclear"


def test_the_same_tasks_are_compared_in_pairs() -> None:
    rows = [an_evaluation(0, 0.5), a_batch(0), an_evaluation(1, 0.55)]
    before = {task: float(task % 2) for task in range(64)}
    after = {**before, **dict.fromkeys(range(0, 16, 2), 1.0)}
    alone, paired = outcome(*rows), outcome(*rows, tasks=(before, after))
    assert alone.kind == "unclear"
    assert paired.kind == "learned", "eight tasks more, and none less, cannot be chance"
    assert "64 tasks, each compared with itself" in paired.text
    none = dict.fromkeys(range(64), 0.0)
    same = outcome(*rows, tasks=(none, none))
    assert same.kind == "unclear"
    assert same.change == pytest.approx((0.0, -0.05662, 0.05662), abs=1e-4), "none of 64 may be one of 20"


def test_without_two_evaluations_the_training_reward_is_compared() -> None:
    rows = [a_batch(index, reward_mean=0.2 + 0.07 * index) for index in range(10)]
    found = outcome(an_evaluation(0, 0.5), *rows)
    assert found.text.startswith("learned: 0.340 -> 0.690 (change +0.350")
    assert "training reward of the first 5 and the last 5 batches" in found.text
    unknown = [{"event": "batch", "batch": index} for index in range(2)]
    assert outcome(*unknown).text == "no change can be told: the lines of the batches have no reward"
    assert outcome(*rows[:1]).text == "no change can be told: 1 batches were trained, and no evaluations compared"


def test_the_line_of_a_named_set_gives_its_own_interval() -> None:
    def line(batch: int, value: float) -> list[dict[str, Any]]:
        ends = {"eval/hard/reward": value, "eval/hard/reward_low": value - 0.1, "eval/hard/reward_high": value + 0.1}
        named = {"event": "evaluation", "set": "hard", "batch": batch, "policy_version": 1, "num_finished": 9, **ends}
        return [named, {**an_evaluation(batch, value), "set": "hard"}]

    found = outcome(*line(0, 0.25), a_batch(0), *line(1, 0.75))
    assert found.change == pytest.approx((0.5, 0.5 - math.hypot(0.1, 0.1), 0.5 + math.hypot(0.1, 0.1)))
