"""What the supervisor tells of a process that ended."""

from pathlib import Path

from services.cli.supervisor import last_error

ERROR = '{"error": "metrics port 9101 is in use", "event": "cannot_start", "level": "error"}\n'


def test_an_error_that_a_process_ended_with_is_told_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"event": "settings", "run": {}}\n' + ERROR)
    assert last_error(tmp_path / "log") == "metrics port 9101 is in use"


def test_a_crash_is_told_by_its_last_lines_and_not_by_an_older_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(ERROR + "Traceback\nKeyError: 'x'\n")
    assert last_error(tmp_path / "log").endswith("\n    Traceback\n    KeyError: 'x'")
    (tmp_path / "log").write_text(ERROR + '{"error": "disk", "event": "commit_failed"}\n')
    assert last_error(tmp_path / "log").endswith('"event": "commit_failed"}')


def test_an_empty_log_is_told_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert last_error(tmp_path / "log").strip() == ""
