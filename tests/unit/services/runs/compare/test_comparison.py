"""Runs beside each other."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gspo_services.runs.compare import as_plain, compare_runs
from gspo_services.runs.compare.curves import interval
from gspo_services.shared.runtime.errors import ConfigurationError
from tests.support.runs.written_runs import write_run


def test_runs_that_differ_only_in_their_seed_are_one_group_with_an_interval(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a{seed}", [0.0, reward], seed=seed) for seed, reward in enumerate((0.5, 0.6, 0.7))]
    other = write_run(tmp_path / "b", [0.0, 0.4], learning_rate=1e-5)
    comparison = compare_runs([*runs, other])
    assert [[run.directory.name for run in group.runs] for group in comparison.groups] == [["a0", "a1", "a2"], ["b"]]
    best = comparison.measures["best held-out reward"]
    assert best[0].mean == pytest.approx(0.6)
    # Student's t: 4.303 (2 degrees of freedom) times 0.1 (the deviation) over the root of 3.
    assert best[0].half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert math.isnan(best[1].half)
    assert comparison.differences == {("learner", "learning_rate"): ["1e-06", "1e-05"]}


def test_defaults_are_filled_in_and_places_are_not_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [0.0, 0.5], keep_checkpoints=2, metrics_port=9102)
    second = write_run(
        tmp_path / "b", [0.0, 0.5], keep_checkpoints=7, metrics_port=9999, weights_endpoint="tcp://127.0.0.1:1"
    )
    comparison = compare_runs([first, second])
    assert [len(group.runs) for group in comparison.groups] == [1, 1], "with one seed twice there is no spread over seeds"
    assert comparison.differences == {("learner", "keep_checkpoints"): ["2", "7"]}


def test_runs_of_different_lengths_are_compared_where_all_have_come(tmp_path: Path) -> None:
    short = write_run(tmp_path / "s", [0.0, 0.2, 0.4], seed=0, num_batches=8)
    long = write_run(tmp_path / "l", [0.0, 0.4, 0.8, 0.8, 0.9], seed=1)
    (group,) = compare_runs([short, long]).groups
    curve = compare_runs([short, long]).curve(group, "held_out", "batches")
    assert curve.x.tolist() == [0, 2, 4]
    assert curve.mean.tolist() == pytest.approx([0.0, 0.3, 0.6])
    assert curve.high[2] - curve.mean[2] == pytest.approx(12.706 * 0.2)
    assert [len(x) for x, _ in curve.runs] == [3, 5], "each run is drawn to its own end"
    assert [run.state for run in group.runs] == ["unfinished", "finished"]


def test_curves_over_tokens_and_seconds_are_means_at_the_same_place(tmp_path: Path) -> None:
    """The second run is twice as slow: after 20 s it has come as far as the first after 10."""
    fast = write_run(tmp_path / "f", [0.0, 0.4, 0.8], seed=0)
    slow = write_run(tmp_path / "s", [0.0, 0.4, 0.8], seed=1, time_scale=2.0)
    comparison = compare_runs([fast, slow])
    (group,) = comparison.groups
    seconds = comparison.curve(group, "held_out", "seconds")
    assert seconds.x[-1] == 40.0
    assert np.interp(20.0, seconds.x, seconds.mean) == pytest.approx((0.4 + 0.2) / 2, abs=0.005)
    tokens = comparison.curve(group, "held_out", "tokens")
    assert tokens.x.tolist() == [0, 201, 406]
    assert tokens.mean.tolist() == pytest.approx([0.0, 0.4, 0.8])


def test_what_it_took_to_come_as_far_as_all_have_come(tmp_path: Path) -> None:
    better = write_run(tmp_path / "a", [0.0, 0.6, 0.9])
    worse = write_run(tmp_path / "b", [0.0, 0.3, 0.6], learning_rate=1e-5)
    comparison = compare_runs([better, worse])
    assert comparison.target == 0.6
    for axis, expected in (("batches", [2, 4]), ("tokens", [201, 406]), ("seconds", [20, 40])):
        assert [each.mean for each in comparison.measures[f"{axis} to a held-out reward of 0.6"]] == expected


def test_a_live_unfinished_damaged_or_empty_run_is_compared_with_a_note(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "a", [0.0, 0.5])
    damaged = write_run(tmp_path / "b", [0.0, 0.25, 0.5], learning_rate=1e-5)
    lines = (damaged / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:20]
    (damaged / "metrics.jsonl").write_text("\n".join(lines))
    empty = tmp_path / "c"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    (empty / "settings.json").write_text('{"of": "another release"}')
    comparison = compare_runs([whole, damaged, empty])
    assert f"{damaged}/metrics.jsonl: 1 damaged line is left out; the first is line 3: not JSON" in comparison.notes
    assert any("c/metrics.jsonl: no batch and no evaluation yet" in note for note in comparison.notes)
    assert any("settings are not compared: " in note and "c/settings.json" in note for note in comparison.notes)
    assert comparison.differences[("learner", "learning_rate")] == ["1e-06", "1e-05", "-"]
    assert math.isnan(comparison.target)
    plain = json.loads(json.dumps(as_plain(comparison), allow_nan=False))
    assert [group["runs"][0]["damaged_lines"] for group in plain["groups"]] == [0, 1, 0]
    assert plain["groups"][2]["measures"]["best held-out reward"] == {"mean": None, "half_interval": None, "values": [None]}


def test_runs_are_named_once_and_there_are_two(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.0, 0.5])
    with pytest.raises(ConfigurationError, match="are the same run: name each once"):
        compare_runs([run, tmp_path / "." / "a"])
    with pytest.raises(ConfigurationError, match="name at least two"):
        compare_runs([run])


def test_the_interval_is_students() -> None:
    """Checked against tables: 2.776 with 4 degrees of freedom."""
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0, math.nan])
    assert (mean, half) == (3.0, pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5)))
