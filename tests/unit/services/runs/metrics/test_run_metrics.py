"""What a run's metrics.jsonl says, and what its lines must have."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.metrics import NoMetrics, best_evaluation, number, read_metrics


def write(directory: Path, *rows: dict[str, Any]) -> None:
    numbered = ({"line": number, **row} for number, row in enumerate(rows, start=1))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))


def batch(index: object, **fields: Any) -> dict[str, Any]:
    return {"event": "batch", "batch": index, "policy_version": 2, **fields}


def an_eval(batch: object, reward: object, **fields: Any) -> dict[str, Any]:
    return {"event": "eval", "batch": batch, "policy_version": 1, "eval/reward": reward, **fields}


DAMAGED = [
    (batch("one"), 'no "batch" that can be used'),
    (batch(True), 'no "batch" that can be used'),
    (batch(-1), 'no "batch" that can be used'),
    (batch(10**400), 'no "batch" that can be used'),
    (an_eval(None, 0.5), 'no "batch" that can be used'),
    (an_eval(0, 0.5, policy_version=1.5), 'no "policy_version" that can be used'),
    (an_eval(0, "high"), 'no "eval/reward" that can be used'),
    (an_eval(0, math.nan), 'no "eval/reward" that can be used'),
    ({"event": "eval", "batch": 0, "policy_version": 1}, 'no "eval/reward" that can be used'),
    ({"event": "evaluation", "batch": 0, "policy_version": 1}, 'no "set" that can be used'),
    ({"event": 7}, 'no "event" that can be used'),
]


@pytest.mark.parametrize(("row", "reason"), DAMAGED, ids=[json.dumps(row)[:60] for row, _ in DAMAGED])
def test_a_line_that_lacks_what_its_event_needs_is_left_out(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path, batch(0), row, {"event": "dropped", "group_id": 4}, batch(1))
    found = read_metrics(tmp_path)
    assert [each["batch"] for each in found.batches] == [0, 1]
    assert [each["group_id"] for _, each in found.events] == [4]
    (damage,) = found.damage
    assert (damage.num_lines, damage.first_line, damage.reason) == (1, 2, reason)


def test_an_evaluation_of_which_no_task_finished_has_no_reward_and_is_not_damaged(tmp_path: Path) -> None:
    write(tmp_path, an_eval(0, None, num_finished=0))
    found = read_metrics(tmp_path)
    assert (found.evaluations, found.damage) == ([], ())


def test_what_was_done_again_counts_once_as_it_was_last(tmp_path: Path) -> None:
    again = batch(1, loss=3.0, again=True)
    write(tmp_path, batch(1, loss=1.0), batch(0, loss=2.0), an_eval(0, 0.25), again, an_eval(0, 0.5))
    found = read_metrics(tmp_path)
    assert [(row["batch"], row["loss"]) for row in found.batches] == [(0, 2.0), (1, 3.0)]
    assert [each.reward for each in found.evaluations] == [0.5]
    assert [(at, row["loss"]) for at, row in found.events] == [(1, 3.0)]


def test_what_happened_is_at_the_batch_that_it_names_or_came_after(tmp_path: Path) -> None:
    write(tmp_path, {"event": "dropped"}, batch(0), batch(1), {"event": "dropped"}, {"event": "quarantined", "batch": 7})
    assert [(at, row["event"]) for at, row in read_metrics(tmp_path).events] == [
        (0, "dropped"), (1, "dropped"), (7, "quarantined"),
    ]  # fmt: skip


def test_the_best_evaluation_is_the_earliest_with_the_highest_score(tmp_path: Path) -> None:
    scores = {"set": "aime", "metric": "avg@2"}
    rows = [an_eval(at, reward, **scores, **{"eval/score": score}) for at, reward, score in ((0, 9.0, 0.5), (4, 2.0, 0.75))]
    write(tmp_path, *rows, an_eval(6, 1.0, **scores, **{"eval/score": 0.75}))
    evaluations = read_metrics(tmp_path).evaluations
    best, rewarded = best_evaluation(evaluations), best_evaluation(evaluations, lambda each: each.reward)
    assert best is not None
    assert (best.batch, best.metric) == (4, "eval/aime/avg@2")
    assert rewarded is not None
    assert rewarded.batch == 0
    assert best_evaluation([]) is None


def test_the_interval_of_an_evaluation_is_what_was_measured_or_unknown(tmp_path: Path) -> None:
    write(tmp_path, an_eval(0, 0.5, **{"eval/reward_error": 0.1}), an_eval(1, 0.5, **{"eval/reward_error": None}))
    measured, unknown = read_metrics(tmp_path).evaluations
    assert measured.half_interval == pytest.approx(0.196, abs=1e-4)
    assert math.isnan(unknown.half_interval)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 10**400, True, "7", None, [1]])
def test_a_measure_that_cannot_be_reckoned_with_is_none(value: object, tmp_path: Path) -> None:
    write(tmp_path, batch(0, loss=value))
    (row,) = read_metrics(tmp_path).batches
    assert math.isnan(number(row, "loss"))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoMetrics, match="there is no such directory"):
        read_metrics(tmp_path / "nothing")
    with pytest.raises(NoMetrics, match="the broker writes it when it starts"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(NoMetrics, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        read_metrics(tmp_path)
