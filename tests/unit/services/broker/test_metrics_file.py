"""metrics.jsonl: each line once, whatever happened to the file."""

import json
from pathlib import Path

from gspo_services.broker.metrics_file import MetricsFile


def lines_of(path: Path) -> list[int]:
    return [json.loads(line)["line"] for line in path.read_text().splitlines()]


def test_lines_are_appended_and_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.last == 0
    metrics.append([{"line": 1, "event": "batch", "loss": None}, {"line": 2}])
    again = MetricsFile(path)
    assert again.last == 2
    again.append([{"line": 3}])
    assert lines_of(path) == [1, 2, 3]
    assert json.loads(path.read_text().splitlines()[0]) == {"line": 1, "event": "batch", "loss": None}


def test_a_half_written_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append([{"line": 1}])
    with path.open("ab") as file:
        file.write(b'{"line": 2, "event": "bat' + b"x" * 100)
    metrics = MetricsFile(path)
    assert metrics.last == 1
    metrics.append([{"line": 2, "event": "batch"}])
    assert lines_of(path) == [1, 2]


def test_nothing_to_write_writes_nothing(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append([])
    assert metrics.last == 0
