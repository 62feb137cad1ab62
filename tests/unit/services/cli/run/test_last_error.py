"""What a process's log says: the error that it ended with, and its repeated warnings."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gspo_services.cli.doctor.command import ago
from gspo_services.cli.doctor.observe import Log, last_batches, read_log
from gspo_services.cli.run.supervisor import FINAL_EVENTS, last_error

ERROR = '{"error": "metrics port 9101 is in use", "event": "cannot_start", "level": "error"}\n'


def test_the_error_that_a_process_ended_with_is_shown_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"event": "settings", "run": {}}\n' + ERROR)
    assert last_error(tmp_path / "log") == "metrics port 9101 is in use"


def test_a_crash_is_shown_by_its_last_lines_and_not_by_an_older_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(ERROR + "Traceback\nKeyError: 'x'\n")
    assert last_error(tmp_path / "log").endswith("\n    Traceback\n    KeyError: 'x'")
    (tmp_path / "log").write_text(ERROR + '{"error": "disk", "event": "commit_failed"}\n')
    assert last_error(tmp_path / "log").endswith('"event": "commit_failed"}')


def test_an_empty_log_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert last_error(tmp_path / "log").strip() == ""


NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


def line(event: str, age_s: float, **fields: object) -> str:
    return json.dumps({"event": event, "timestamp": (NOW - timedelta(seconds=age_s)).isoformat(), **fields}) + "\n"


@pytest.mark.parametrize("event", FINAL_EVENTS)
def test_every_final_event_is_an_error(tmp_path: Path, event: str) -> None:
    (tmp_path / "log").write_text(line(event, 3.0, error="session a has this run"))
    assert read_log(tmp_path / "log", NOW) == Log(event=event, age_s=3.0, error="session a has this run")


def test_warnings_of_the_last_two_minutes_are_counted_with_those_that_were_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        line("odd", 121.0, level="warning")
        + line("odd", 119.0, level="warning")
        + "no event\n"
        + line("odd", 60.0, level="warning", left_out=9)
        + line("strange", 50.0, level="warning")
        + line("usual", 40.0, level="info")
    )
    seen = read_log(tmp_path / "log", NOW)
    assert seen == Log(event="usual", age_s=40.0, error="", warnings={"odd": 11, "strange": 1})


def test_an_old_log_has_a_last_event_and_no_warnings(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line("odd", 9000.0, level="warning"))
    assert read_log(tmp_path / "log", NOW) == Log(event="odd", age_s=9000.0, error="")


def test_a_clock_that_differs_or_was_set_hides_no_warning_and_counts_no_old_one(tmp_path: Path) -> None:
    (tmp_path / "ahead").write_text(
        line("old", -3400.0, level="warning") + line("odd", -3590.0, level="warning") + line("usual", -3600.0)
    )
    assert read_log(tmp_path / "ahead", NOW) == Log(event="usual", age_s=-3600.0, error="", warnings={"odd": 1})
    (tmp_path / "set-back").write_text(
        line("old", -7200.0, level="warning") + line("odd", 60.0, level="warning") + line("usual", 40.0)
    )
    assert read_log(tmp_path / "set-back", NOW) == Log(event="usual", age_s=40.0, error="", warnings={"odd": 1})
    assert [ago(age_s) for age_s in (40.0, -1.0, -10_800.0)] == ["40 s ago", "0 s ago", "by a clock 3.0 h ahead"]


def test_the_pace_of_batches_is_that_of_the_run_and_not_of_a_clock_that_was_set(tmp_path: Path) -> None:
    rows = [{"event": "batch", "time": time, "time_s": time_s} for time, time_s in ((9000.0, 10.0), (20.0, 25.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["time_s"] for row in last_batches(tmp_path / "metrics.jsonl")] == [10.0, 25.0]
