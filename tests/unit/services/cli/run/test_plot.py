"""plot.png: whatever was recorded can be drawn, and the curves are what they say."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gspo_services.cli.run import plot
from gspo_services.cli.run.plot import happened, write_plot
from gspo_services.runs.metrics import read_metrics
from tests.support.cli.metrics_files import a_batch, an_eval, recorded


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of full size takes a second."""
    monkeypatch.setattr(plot, "DPI", 20)


def test_the_picture_has_twice_the_points_of_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    header = write_plot(read_metrics(recorded(tmp_path, a_batch(0)))).read_bytes()[:24]
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
    path = write_plot(read_metrics(recorded(tmp_path, *rows)))
    assert path == tmp_path / "plot.png"
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"


def test_nothing_recorded_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        write_plot(read_metrics(recorded(tmp_path, {"event": "dropped"})))


def test_new_measures_and_events_can_be_drawn(tmp_path: Path) -> None:
    lengths = {"length/mean": 12.0, "length/p95": 20, "length/max": 30, "length/cut_off": 0.25}
    rows: list[dict[str, Any]] = [a_batch(index, **lengths) for index in range(14)]
    rows += [{**an_eval(5, 0.5), "eval/reward_error": 0.01, "num_finished": 64}, {"event": "dropped", "reason": "stale"}]
    rows += [{"event": "quarantined", "batch": 3}, a_batch(13, again=True), {"event": "requeued", "batches": [3]}]
    assert write_plot(read_metrics(recorded(tmp_path, *rows))).stat().st_size > 5_000


def test_events_are_where_the_run_was_when_they_happened(tmp_path: Path) -> None:
    drop = {"event": "dropped", "reason": "stale"}
    path = recorded(
        tmp_path, drop, a_batch(0), a_batch(1), drop, {"event": "quarantined", "batch": 4}, a_batch(1, again=True)
    )
    assert happened(read_metrics(path)) == {"dropped": [0, 1], "quarantined": [4], "again": [1], "requeued": []}


def test_values_that_nobody_would_write_do_not_stop_the_picture(tmp_path: Path) -> None:
    rows = []
    for index, value in enumerate(["x", None, [], {}, 1e308, -1e308, True]):
        rows.append({key: value if key not in ("event", "batch") else each for key, each in a_batch(index).items()})
        keys = ("num_finished", "eval/reward_error", "eval/versions_newer")
        rows.append({**an_eval(index, 0.5), **dict.fromkeys(keys, value)})
    assert write_plot(read_metrics(recorded(tmp_path, *rows))).is_file()


@pytest.mark.parametrize(("widths", "drawn"), [([4e-4, 2e-2, 9e-3], True), ([4e-4, 4e-4, 4e-4], False)])
def test_a_clip_range_that_changes_is_a_curve_for_each_lag(widths: list[float], drawn: bool, tmp_path: Path) -> None:
    rows = [a_batch(i, **{"clip_fraction/lag_1": 0.1, "clip_range_high/lag_1": width}) for i, width in enumerate(widths)]
    recorded_curves = read_metrics(recorded(tmp_path, *rows))
    figure = Figure()
    plot._clip(figure.add_subplot(), recorded_curves)
    curves = [line.get_ydata().tolist() for axes in figure.axes[1:] for line in axes.lines]
    assert (widths in curves) is drawn
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert ("upper bound (nats, right)" in labels) is drawn
