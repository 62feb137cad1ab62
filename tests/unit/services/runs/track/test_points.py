"""Rows of metrics.jsonl as points of a tracker: names in groups, one value at each step."""

from typing import Any

import pytest

from gspo_services.runs.track.names import tracker_name, tracker_names, usable
from gspo_services.runs.track.points import Point, Translation


def a_batch(line: int, batch: int, **fields: Any) -> dict[str, Any]:
    return {"line": line, "event": "batch", "batch": batch, "time": 5.5, "time_s": 2.0, "again": False, **fields}


def an_eval(line: int, batch: int, reward: float | None = 0.5) -> dict[str, Any]:
    return {"line": line, "event": "eval", "batch": batch, "eval/reward": reward, "num_finished": 8, "time": 6.0}


def points(*rows: dict[str, Any]) -> list[Point]:
    translation = Translation()
    return [point for row in rows if (point := translation.point(row)) is not None]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train/reward", "train/reward"), ("reward_mean", "train/reward_mean"), ("loss", "train/loss"),
        ("length/p95", "length/p95"), ("lag/all", "lag/all"), ("lag/lag_3_4", "lag/lag_3_4"),
        ("clip_fraction/lag_1", "clip/fraction/lag_1"), ("clip_scale", "clip/scale"), ("entropy/all", "policy/entropy/all"),
        ("mismatch/all", "ratio/mismatch/all"), ("ratio_p99/lag_0", "ratio/ratio_p99/lag_0"),
        ("tokens_per_s", "speed/tokens_per_s"), ("train_s", "speed/train_s"),
        ("expert_load_unused/all", "experts/load_unused/all"),
        ("experts_changed/all", "experts/changed/all"), ("num_tokens", "data/num_tokens"), ("tokens/all", "data/tokens/all"),
        ("policy_version", "progress/policy_version"), ("time_s", "progress/time_s"),
    ],
)  # fmt: skip
def test_names_are_in_groups(key: str, name: str) -> None:
    assert tracker_name(key, "batch") == name


def test_all_of_an_evaluation_is_in_one_group() -> None:
    (point,) = points(an_eval(1, 5))
    assert point.values == {"eval/reward": 0.5, "eval/num_finished": 8.0, "progress/line": 1.0}
    assert (point.batch, point.time, point.event) == (5, 6.0, "eval")


def test_names_that_users_invent_are_made_usable_and_stay_apart() -> None:
    names = tracker_names(
        ["train/reward/a:b", "train/reward/a?b", "train/reward//../x", "train/reward/" + "y" * 500], "batch"
    )
    assert list(names.values())[:3] == ["train/reward/a_b", "train/reward/a_b_2", "train/reward/x"]
    assert len(set(names.values())) == 4
    assert all(len(name) <= 200 for name in names.values())
    assert usable("///") == "unnamed"


def test_what_is_no_number_is_a_gap() -> None:
    huge = 10**400
    (point,) = points(a_batch(1, 0, loss=None, text="x", flag=True, nan=float("nan"), huge=huge, good=1))
    assert point.values == {"progress/time_s": 2.0, "train/good": 1.0, "progress/line": 1.0}


def test_a_batch_that_is_trained_again_gives_no_second_value_at_its_step() -> None:
    found = points(
        a_batch(1, 0, loss=1.0), a_batch(2, 1, loss=2.0), a_batch(3, 1, loss=3.0, again=True), a_batch(4, 2, loss=4.0)
    )
    assert [(point.batch, point.values["train/loss"]) for point in found] == [(0, 1.0), (1, 2.0), (2, 4.0)]
    assert found[-1].values["events/trained_again"] == 1.0


def test_evaluations_have_steps_of_their_own() -> None:
    found = points(a_batch(1, 7), an_eval(2, 5), an_eval(3, 5), a_batch(4, 8))
    assert [(point.event, point.batch) for point in found] == [("batch", 7), ("eval", 5), ("batch", 8)]


def test_events_are_counted_up_to_the_next_batch() -> None:
    stale = {"event": "dropped", "reason": "stale", "num_tokens": [1]}
    found = points(
        a_batch(1, 0), {**stale, "line": 2}, {**stale, "line": 3}, {"event": "quarantined", "batch": 1, "line": 4},
        {"event": "what is this?", "line": 5}, a_batch(6, 2),
    )  # fmt: skip
    events = {name: value for name, value in found[1].values.items() if name.startswith("events/")}
    assert events == {"events/dropped": 2.0, "events/dropped_stale": 2.0, "events/quarantined": 1.0}
    assert len(found) == 2
