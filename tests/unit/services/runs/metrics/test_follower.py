"""Reading metrics.jsonl while it is written, cut, replaced or spoiled."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_services.runs.metrics import Damage, MetricsFollower
from gspo_services.runs.metrics import follower as module


def line(number: int, **fields: object) -> str:
    return json.dumps({"line": number, "event": "batch", "batch": number, **fields}) + "\n"


def numbers(follower: MetricsFollower) -> list[int]:
    found = []
    while rows := follower.read():
        found += [row["line"] for row in rows]
    return found


def test_each_line_is_read_once_as_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert numbers(follower) == []
    path.write_text(line(1) + line(2))
    assert numbers(follower) == [1, 2]
    with path.open("a") as file:
        file.write(line(3))
    assert numbers(follower) == [3]
    assert numbers(follower) == []


def test_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = line(2)
    path.write_text(line(1) + whole[:9])
    follower = MetricsFollower(path)
    assert numbers(follower) == [1]
    path.write_text(line(1) + whole)
    assert numbers(follower) == [2]
    assert follower.damage is None


def test_a_half_line_that_the_broker_overwrites_is_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + '{"line": 2, "event": "bat')
    follower = MetricsFollower(path)
    assert numbers(follower) == [1]
    path.write_text(line(1) + line(2, reward=1.0) + line(3))
    assert numbers(follower) == [2, 3]


def replaced(path: Path, text: str) -> None:
    other = path.with_name("new")
    other.write_text(text)
    other.replace(path)


AFTERWARDS = {
    "replaced by a longer one": (replaced, line(1, longer="x" * 50) + line(2) + line(3), [3]),
    "replaced by one with lines in the same places": (replaced, line(4) + line(5) + line(6), [4, 5, 6]),
    "written anew with longer lines": (Path.write_text, line(3, longer="x" * 500) + line(4), [3, 4]),
    "written anew and shorter": (Path.write_text, line(3), [3]),
    "cut": (Path.write_text, line(1), []),
    "emptied": (Path.write_text, "", []),
}


@pytest.mark.parametrize(("change", "text", "new"), AFTERWARDS.values(), ids=AFTERWARDS)
def test_a_file_that_is_another_one_is_read_again_without_what_is_known(
    change: Callable[[Path, str], object], text: str, new: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path)
    assert numbers(follower) == [1, 2]
    change(path, text)
    assert numbers(follower) == new
    with path.open("a") as file:
        file.write(line(9))
    assert numbers(follower) == [9]
    assert follower.damage is None


def test_a_file_that_was_cut_within_an_endless_line_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + "y" * 1000)
    follower = MetricsFollower(path, most_line_bytes=100)
    assert numbers(follower) == [1]
    path.write_text(line(1) + line(2))
    assert numbers(follower) == [2]
    assert follower.damage is None


def test_a_file_that_was_rotated_under_the_broker_begins_with_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    follower = MetricsFollower(path, most_line_bytes=64)
    assert numbers(follower) == [1, 2]
    size = 1_000_000
    path.rename(tmp_path / "metrics.jsonl.1")
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(line(3).encode())
    assert numbers(follower) == [3]
    assert numbers(MetricsFollower(path)) == [3]
    assert follower.damage is None


DAMAGED = [
    (b'{"event": "ba', "not JSON"),
    (b'{"event": "dropped", "line": 2', "not JSON"),
    (b'{"a":' * 100_000, "not JSON"),
    (b'{"line": 2, "event": "a\x00b"}', "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (line(2).encode("utf-16"), "not UTF-8"),
    (b"[1]", "not a JSON object"),
    (b'{"event": "dropped"}', 'no number ("line")'),
    (b'{"event": "dropped", "line": "2"}', 'no number ("line")'),
    (b'{"event": "dropped", "line": true}', 'no number ("line")'),
    (b'{"event": "dropped", "line": -1}', 'no number ("line")'),
    (b'{"line": 2}', 'no "event" that can be used'),
    (line(1).encode().rstrip(), "its number is 1, and the line before it has 1"),
    (b"y" * 1_000_001, "longer than 1000000 bytes"),
    (b"y" * 3_000_000, "longer than 1000000 bytes"),
]


@pytest.mark.parametrize(("damaged", "reason"), DAMAGED, ids=[repr(damaged[:40]) for damaged, _ in DAMAGED])
def test_a_damaged_line_costs_itself_alone_and_is_told_once(damaged: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1).encode() + damaged + b"\n" + line(3).encode() + damaged + b"\n" + line(4).encode())
    follower = MetricsFollower(path, most_line_bytes=1_000_000)
    assert numbers(follower) == [1, 3, 4]
    assert follower.damage is not None
    assert (follower.damage.num_lines, follower.damage.first_line, follower.damage.reason) == (2, 2, reason)
    told: list[str] = []
    follower.tell_damage(told.append)
    follower.tell_damage(told.append)
    assert told == [f"{path}: 2 damaged lines are left out; the first is line 2: {reason}"]


def test_the_damage_is_that_of_the_file_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + "\n" + "damaged\n" + line(2))
    follower = MetricsFollower(path)
    assert numbers(follower) == [1, 2]
    assert follower.damage == Damage(path=path, num_lines=1, first_line=3, reason="not JSON")
    path.write_text(line(1))
    assert numbers(follower) == []
    assert follower.damage is None


def test_a_line_longer_than_a_block_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2, text="x" * 200) + line(3))
    follower = MetricsFollower(path)
    assert [len(follower.read()), *numbers(follower)] == [2, 3]


def test_an_endless_line_is_never_held_and_never_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1))
    follower = MetricsFollower(path, most_line_bytes=65_536)
    assert numbers(follower) == [1]
    with path.open("ab") as file:
        file.write(b"y" * 8_000_000)
    tracemalloc.start()
    assert numbers(follower) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert follower.damage == Damage(path=path, num_lines=1, first_line=2, reason="longer than 65536 bytes")
    with path.open("r+b") as file:
        file.seek(len(line(1)))
        file.write(b"\n" + line(9).encode())  # It is behind what was read: whoever reads it again would see it.
    with path.open("ab") as file:
        file.write(b"y" * 10)
    assert numbers(follower) == []
    with path.open("ab") as file:
        file.write(b"\n" + line(2).encode())
    assert numbers(follower) == [2]
    assert follower.damage.num_lines == 1
