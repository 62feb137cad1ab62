"""What a process does while it starts is read from its log, whatever else is in there."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_services.cli.run.starts import Starts
from gspo_services.cli.run.supervisor import Child
from tests.support.cli.statuses import a_child

BEGIN = datetime(2026, 11, 27, 12, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def a_process(tmp_path: Path, name: str = "rollout-0", pid: int = 7) -> Child:
    child = a_child(name)
    child.log_path = tmp_path / f"{name}.log"
    child.process = SimpleNamespace(pid=pid, returncode=None)  # type: ignore[assignment]
    return child


def write(child: Child, clock: Clock, event: str, age_s: float = 0.0, **fields: Any) -> None:
    at = (clock.now - timedelta(seconds=age_s)).isoformat().replace("+00:00", "Z")
    with child.log_path.open("a") as file:
        file.write(json.dumps({**fields, "event": event, "timestamp": at}) + "\n")


def test_a_server_that_starts_is_shown_with_its_seconds(tmp_path: Path, clock: Clock) -> None:
    child, starts = a_process(tmp_path), Starts(clock)
    assert starts.doing(child) == "starts"
    write(child, clock, "engine_server_started")
    clock.now += timedelta(seconds=3)
    assert starts.doing(child) == "starts SGLang, 3 s"
    write(child, clock, "engine_server_starting", age_s=1.0, waited_s=5, last_line="Load weight begin")
    write(child, clock, "settings")
    assert starts.doing(child) == "starts SGLang, 6 s"
    write(child, clock, "engine_server_ready")
    assert starts.doing(child) == "has SGLang and waits for weights, 0 s"
    write(child, clock, "weights_loaded")
    assert starts.doing(child) == ""
    write(child, clock, "engine_server_started")  # that of an update, or a lie
    assert starts.doing(child) == ""
    again = a_process(tmp_path, pid=8)
    clock.now += timedelta(seconds=60)
    assert starts.doing(again) == "starts", "what the former process has said is not its own"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-27] WARNING no JSON", "[]", "3", '"event"', "{}", '{"event": "weights_loaded"}',
        '{"event": "weights_loaded", "timestamp": "yesterday"}', '{"event": ["x"], "timestamp": "2026-11-27T12:00:00Z"}',
        "[" * 9999,
        '{"event": "engine_server_starting", "timestamp": "2026-11-27T12:00:00Z", "waited_s": "long"}',
    ],
)  # fmt: skip
def test_lines_of_libraries_and_broken_ones_are_passed_over(line: str, tmp_path: Path, clock: Clock) -> None:
    child = a_process(tmp_path, "learner")
    write(child, clock, "memory_of_a_rank_gib")
    with child.log_path.open("a") as file:
        file.write(line + "\n")
    assert Starts(clock).doing(child) == ("starts SGLang, 0 s" if "waited_s" in line else "loads the model, 0 s")


def test_what_does_not_run_or_is_no_part_of_the_run_does_nothing(tmp_path: Path, clock: Clock) -> None:
    tracker = a_process(tmp_path)
    tracker.spec = replace(tracker.spec, is_essential=False)
    assert [Starts(clock).doing(each) for each in (tracker, a_child("rollout-0", "restarting"))] == ["", ""]
