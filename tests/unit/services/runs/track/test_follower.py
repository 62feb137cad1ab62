"""Reading metrics.jsonl while it is written, cut, replaced or spoiled."""

import json
from pathlib import Path

import pytest

from gspo_services.runs.track import MetricsFollower
from gspo_services.runs.track import follower as module


def line(record: int, **fields: object) -> str:
    return json.dumps({"record": record, "event": "batch", **fields}) + "\n"


def records(follower: MetricsFollower) -> list[int]:
    found = []
    while rows := follower.read():
        found += [row["record"] for row in rows]
    return found


def test_each_line_is_read_once_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert records(follower) == []
    path.write_text(line(1) + line(2))
    assert records(follower) == [1, 2]
    with path.open("a") as file:
        file.write(line(3))
    assert records(follower) == [3]
    assert records(follower) == []


def test_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = line(2)
    path.write_text(line(1) + whole[:9])
    follower = MetricsFollower(path)
    assert records(follower) == [1]
    path.write_text(line(1) + whole)
    assert records(follower) == [2]
    assert follower.num_unreadable == 0


def test_a_half_line_that_the_broker_overwrites_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"record": 2, "event": "bat')
    follower = MetricsFollower(path)
    assert records(follower) == [1]
    path.write_text(line(1) + line(2, reward=1.0) + line(3))
    assert records(follower) == [2, 3]


def test_a_file_that_was_replaced_is_read_again_without_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path)
    assert records(follower) == [1, 2]
    other = tmp_path / "new"
    other.write_text(line(1, longer="x" * 50) + line(2) + line(3))
    other.replace(path)
    assert records(follower) == [3]


def test_a_file_that_was_replaced_by_a_shorter_one_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2, longer="x" * 500))
    follower = MetricsFollower(path)
    assert records(follower) == [1, 2]
    path.write_text(line(1) + line(2) + line(3))
    assert records(follower) == [3]


def test_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path)
    assert records(follower) == [1, 2]
    path.write_text(line(1))
    assert records(follower) == []
    path.write_text(line(1) + line(2) + line(3))
    assert records(follower) == [3]


def test_a_file_that_was_rotated_under_the_broker_begins_with_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path)
    assert records(follower) == [1, 2]
    size = path.stat().st_size
    path.rename(tmp_path / "metrics.jsonl.1")
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(line(3).encode())
    assert records(follower) == [3]
    assert records(MetricsFollower(path)) == [3]


def test_lines_of_others_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    spoiled = [
        '{"record": "2"}',
        '{"record": true}',
        '{"record": -1}',
        "[1]",
        "{",
        "\udcff".encode("utf-8", "surrogateescape"),
    ]
    texts = [text if isinstance(text, bytes) else text.encode() for text in spoiled]
    path.write_bytes(line(1).encode() + b"\n".join(texts) + b"\n\n" + b'{"a":' * 100_000 + b"\n" + line(2).encode())
    follower = MetricsFollower(path)
    assert records(follower) == [1, 2]
    assert follower.num_unreadable == len(spoiled) + 1


def test_lines_longer_than_a_block_are_read_and_endless_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(module, "MOST_LINE_BYTES", 400)
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2, text="x" * 200) + line(3))
    assert records(MetricsFollower(path)) == [1, 2, 3]
    path.write_text(line(1) + "y" * 1000 + "\n" + line(2))
    assert records(MetricsFollower(path)) == [1, 2]
