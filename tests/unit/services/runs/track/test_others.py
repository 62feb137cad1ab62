"""Drops of a run's other brokers become counts of the batch that they came before."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.track.cursor import Cursor, CursorFile
from gspo_services.runs.track.others import OtherBrokers
from gspo_services.runs.track.points import Point
from gspo_services.runs.track.samples import SampleReader
from gspo_services.runs.track.session import Samples, TrackerSession
from tests.support.tracking import ListTracker, write_rows

DROP = {"event": "dropped", "reason": "stale"}


def written(directory: Path, *rows: dict[str, Any]) -> None:
    path = directory / "metrics.jsonl"
    known = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as file:
        file.writelines(json.dumps({"line": known + number, **row}) + "\n" for number, row in enumerate(rows, 1))


def a_batch(index: int) -> dict[str, Any]:
    return {"event": "batch", "batch": index, "loss": 9.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of three brokers."""
    (tmp_path / "settings.json").write_text(json.dumps({"broker": {"num_brokers": 3, "number": 0}}))
    for name in ("trackers", "broker-1", "broker-2"):
        (tmp_path / name).mkdir()
    return tmp_path


def drops(run: Path) -> list[float]:
    points: list[Point] = []
    samples = Samples(reader=SampleReader(run, run), most=0)
    TrackerSession(run, CursorFile(run, "x"), Cursor(tracker_run="r"), lambda: ListTracker(points), samples).send()
    return [point.values.get("events/dropped_stale", 0.0) for point in points]


def test_what_another_broker_dropped_counts_at_its_batch(run: Path) -> None:
    write_rows(run, 3)
    written(run / "broker-1", a_batch(0), DROP, DROP, a_batch(1), a_batch(2), DROP)
    an_eval = {"event": "eval", "batch": 1, "policy_version": 2, "eval/reward": 0.5}
    written(run / "broker-2", DROP, a_batch(0), a_batch(1), an_eval, a_batch(2))
    assert drops(run) == [1, 3, 3]


def test_what_is_written_late_counts_later_and_a_broker_that_has_written_nothing_is_waited_for_by_nobody(run: Path) -> None:
    others = OtherBrokers(run)
    written(run / "broker-1", a_batch(0))
    assert [row["event"] for row in others.until(0)] == ["batch"]
    assert list(others.until(1)) == []
    written(run / "broker-1", a_batch(1), DROP, a_batch(2), DROP, a_batch(3))
    assert [row["event"] for row in others.until(2)] == ["batch", "dropped", "batch"]
    assert [row["event"] for row in others.until(3)] == ["dropped", "batch"]


def test_a_batch_that_was_trained_again_and_broken_lines_hold_nothing_up(run: Path) -> None:
    written(
        run / "broker-1", a_batch(0), a_batch(1), a_batch(0), {"event": "batch", "batch": None}, DROP, a_batch(1), a_batch(2)
    )
    with (run / "broker-1" / "metrics.jsonl").open("a") as file:
        file.write("no line\n")
    others = OtherBrokers(run)
    assert [row["batch"] for row in others.until(0)] == [0]
    assert len(list(others.until(1))) == 1
    assert [row["event"] for row in others.until(2)] == ["batch", "dropped", "batch", "batch"]
