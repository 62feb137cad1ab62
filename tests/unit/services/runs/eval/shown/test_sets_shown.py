"""Where a run's lines about named sets are shown: record, console, trackers, comparison, page, Prometheus, plot."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.broker.ledger import SetTerms
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.cli.run import write_plot
from gspo_services.cli.run.happenings import Happenings
from gspo_services.runs.compare import compare_runs
from gspo_services.runs.metrics import read_metrics
from gspo_services.runs.track.points import Translation
from gspo_services.runs.view.overview import Curves
from tests.support.broker.ledger_training import R1, harness
from tests.support.runs.written_runs import write_run

BOTH = SetTerms(
    name="aime", every_batches=1, num_tasks=2, samples=2, metrics=("avg@2", "elo"), ratings=(1500.0, 1500.0), best_by="avg@2"
)


def lines(*rewards: float, first: int = 1) -> list[dict[str, Any]]:
    """Those of one real evaluation of two tasks with two samples each."""
    world = harness(evaluation_sets=(BOTH,))
    for lease, reward in zip(world.lease(R1, 4, 1), rewards, strict=True):
        world.episode(R1, lease, 1, reward)
    return [{"line": number, "time": 5.0, "time_s": 9.0, **line} for number, line in enumerate(world.lines, start=first)]


def test_the_console_says_each_metric_its_interval_and_what_is_the_best_so_far() -> None:
    news = Happenings(max_lag=2)
    texts = [each.text for each in news.of_rows(lines(1.0, 0.0, 0.0, 0.0))]
    assert texts[0].startswith("aime after 0 batches: avg@2 0.250 (0.0")
    assert ", elo 1,309 (916 to 1,702)" in texts[0]
    assert texts[0].endswith("8 tokens sampled")
    assert texts[1:] == ["aime/avg@2 after 0 batches is the best so far: 0.25"]
    assert [each.text for each in news.of_rows(lines(0.0, 0.0, 0.0, 0.0)) if "best" in each.text] == []
    assert "elo - (beyond " in news.of_rows(lines(1.0, 1.0, 1.0, 1.0))[0].text


def test_the_record_has_each_set_and_the_score_of_the_best_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(1.0, 0.0, 1.0, 1.0)))
    found = read_metrics(tmp_path)
    (scores,) = found.sets
    assert (scores.name, scores.batch, scores.metrics["avg@2"][0]) == ("aime", 0, 0.75)
    assert scores.metrics["avg@2"][1] < 0.75 < scores.metrics["avg@2"][2]
    assert [(each.score, each.metric, each.reward) for each in found.evaluations] == [(0.75, "eval/aime/avg@2", 0.75)]
    assert (found.events, found.damage) == ([], ())


def test_trackers_get_a_point_of_each_set_at_its_batch_once() -> None:
    translation = Translation()
    rows = lines(1.0, 0.0, 1.0, 1.0)
    first, second = (point for row in rows if (point := translation.point(row)) is not None)
    assert (first.event, first.batch, first.values["eval/aime/avg_2"]) == ("evaluation", 0, 0.75)
    assert "eval/num_finished" not in first.values
    assert (second.event, second.values["eval/reward"]) == ("eval", 0.75)
    assert translation.point(rows[0]) is None
    assert translation.point({**rows[0], "set": "other"}) is not None


def test_runs_are_compared_by_the_last_value_of_each_metric(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a", [0.0, 0.5], learning_rate=1e-5), write_run(tmp_path / "b", [0.0, 0.5])
    with (one / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines(1.0, 0.0, 1.0, 1.0, first=9))
    measured = compare_runs([one, other]).measures["last aime/avg@2"]
    assert measured[0].mean == 0.75
    assert math.isnan(measured[1].mean)


def test_the_page_has_the_newest_result_of_each_set() -> None:
    curves = Curves()
    curves.take(lines(1.0, 0.0, 1.0, 1.0))
    curves.take(lines(1.0, 1.0, 1.0, 1.0))
    (found,) = curves.plain()["sets"]
    assert (found["set"], found["metrics"]["avg@2"][0], found["num_action_tokens"]) == ("aime", 1.0, 8.0)
    value, low, high = found["metrics"]["elo"]
    assert (value, high) == (None, None)
    assert 1400 < low < 1500


def test_prometheus_has_a_series_for_each_set_and_metric() -> None:
    world, registry = harness(evaluation_sets=(BOTH,)), CollectorRegistry()
    metrics = BrokerMetrics(registry)
    for lease, reward in zip(world.lease(R1, 4, 1), (1.0, 0.0, 1.0, 1.0), strict=True):
        world.episode(R1, lease, 1, reward)
    metrics.observe(world.ledger, 0, 0, 0.0)
    assert registry.get_sample_value("gspo_broker_eval_score", {"set": "aime", "metric": "avg@2"}) == 0.75


def test_the_picture_has_a_curve_for_each_metric_that_is_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", [0.0, 0.5])
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines(1.0, 0.0, 1.0, 1.0, first=9))
    from matplotlib.figure import Figure

    legends: list[list[str]] = []
    save = Figure.savefig

    def noting(figure: Figure, *arguments: Any, **options: Any) -> None:
        legends.append([label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]])
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", noting)
    assert write_plot(read_metrics(run)).stat().st_size > 1000
    assert "aime avg@2" in legends[0]
    assert "aime elo" not in legends[0]
