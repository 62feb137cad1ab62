"""plot.png: whatever was recorded can be drawn, and the curves are what they say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gspo_services.cli.run import plot
from gspo_services.cli.run.plot import read_recorded, write_plot
from gspo_services.cli.run.smoothing import half_interval, mean, quantile, rolling, window
from tests.unit.services.cli.run.test_report import a_batch, an_eval, recorded


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of full size takes a second."""
    monkeypatch.setattr(plot, "DPI", 20)


def test_the_picture_has_twice_the_points_of_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    header = write_plot(recorded(tmp_path, a_batch(0))).read_bytes()[:24]
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (3200, 1800)


@pytest.mark.parametrize(
    "rows",
    [
        [a_batch(index, **{"clip_fraction/lag_1": 0.1}) for index in range(5)] + [an_eval(0, 0.1), an_eval(5, 0.6)],
        [a_batch(0, **{"clip_fraction/all": None, "tokens_per_s": None})],
        [an_eval(0, 0.5)],
        [a_batch(index, reward_mean=-3.0 * index) for index in range(3)],
    ],
    ids=["whole", "one batch", "evaluation alone", "rewards below zero"],
)
def test_whatever_was_recorded_can_be_drawn(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    path = write_plot(recorded(tmp_path, *rows))
    assert path == tmp_path / "plot.png"
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_recorded_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        write_plot(recorded(tmp_path, {"event": "dropped"}))


def test_new_measures_and_events_can_be_drawn(tmp_path: Path) -> None:
    lengths = {"length/mean": 12.0, "length/p95": 20, "length/max": 30, "length/cut_off": 0.25}
    rows: list[dict[str, Any]] = [a_batch(index, **lengths) for index in range(14)]
    rows += [{**an_eval(5, 0.5), "eval/reward_error": 0.01, "num_finished": 64}, {"event": "dropped", "reason": "stale"}]
    rows += [{"event": "set_aside", "batch": 3}, a_batch(13, again=True), {"event": "released", "batches": [3]}]
    assert write_plot(recorded(tmp_path, *rows)).stat().st_size > 5_000


def test_events_are_where_the_run_was_when_they_happened(tmp_path: Path) -> None:
    drop = {"event": "dropped", "reason": "stale"}
    path = recorded(tmp_path, drop, a_batch(0), a_batch(1), drop, {"event": "set_aside", "batch": 4}, a_batch(1, again=True))
    events = read_recorded(path / "metrics.jsonl").events
    assert events == {"dropped": [0.0, 1.0], "set_aside": [4.0], "again": [1.0], "released": []}


def test_values_that_nobody_would_write_do_not_stop_the_picture(tmp_path: Path) -> None:
    rows = []
    for index, value in enumerate(["x", None, [], {}, 1e308, -1e308, True]):
        rows.append({key: value if key not in ("event", "batch") else each for key, each in a_batch(index).items()})
        keys = ("batch", "eval/reward", "num_finished", "eval/reward_error", "eval/versions_newer")
        rows.append({"event": "eval", **dict.fromkeys(keys, value)})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_plot(tmp_path).is_file()


def test_few_values_are_not_smoothed() -> None:
    assert [window(count) for count in (1, 11, 12, 60, 200)] == [1, 1, 3, 3, 11]
    assert rolling([1.0, 5.0, math.nan], mean)[:2] == [1.0, 5.0]


def test_a_rolling_window_is_whole_at_both_ends_and_leaves_gaps() -> None:
    values = [0.0] * 59 + [30.0]
    assert rolling(values, mean)[-1] == 10.0
    assert rolling(values, quantile(0.5))[-1] == 0.0
    values[30] = math.nan
    assert math.isnan(rolling(values, mean)[30])


def test_quantiles_are_between_values() -> None:
    assert quantile(0.25)([4.0, 1.0, 3.0, 2.0]) == 1.75
    assert quantile(0.9)([7.0]) == 7.0


def test_the_interval_of_an_evaluation_is_measured_or_there_is_none() -> None:
    assert half_interval(0.1) == pytest.approx(0.196)
    assert half_interval(math.nan) == 0.0


@pytest.mark.parametrize(("widths", "drawn"), [([4e-4, 2e-2, 9e-3], True), ([4e-4, 4e-4, 4e-4], False)])
def test_a_clip_range_that_changes_is_a_curve_for_each_lag(widths: list[float], drawn: bool, tmp_path: Path) -> None:
    rows = [a_batch(i, **{"clip_fraction/lag_1": 0.1, "clip_range_high/lag_1": width}) for i, width in enumerate(widths)]
    recorded_curves = read_recorded(recorded(tmp_path, *rows) / "metrics.jsonl")
    figure = Figure()
    plot._clip(figure.add_subplot(), recorded_curves)
    curves = [line.get_ydata().tolist() for axes in figure.axes[1:] for line in axes.lines]
    assert (widths in curves) is drawn
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert ("upper bound (nats, right)" in labels) is drawn
