"""``gspo track`` and the processes that ``gspo run`` starts for it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo_services.cli.run.processes import tracker_specs
from gspo_services.runs.track import CursorFile, find_client
from gspo_services.runs.track.clients import CLIENTS
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, override_settings
from tests.support.processes.evaluated_run import append, rows, write_evaluated_run

ROOT = Path(__file__).parents[5]

CLIENT = """
import json, os

class Tracker:
    def __init__(self, run):
        self.path = os.path.join(str(run.directory), "sent.jsonl")
    def last_line(self):
        return None
    def write(self, point, samples):
        if os.environ.get("REFUSES"):
            raise ConnectionError("no route\\x1b[2J to the tracker")
        with open(self.path, "a") as file:
            file.write(json.dumps([point.line, point.batch, samples is not None]) + "\\n")
    def flush(self):
        pass
    def close(self):
        pass
"""
PROGRAM = """
import sys
from gspo_services.runs.track import command
from gspo_services.runs.track.clients import CLIENTS, Client
CLIENTS["tensorboard"] = Client(package="json", opener="own_client:Tracker")
sys.exit(command.main(sys.argv[1:]))
"""


def track(run: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, with a client of the test's in place of TensorBoard's."""
    (run.parent / "own_client.py").write_text(CLIENT)
    values = {**os.environ, "PYTHONPATH": f"{ROOT}:{run.parent}", **environment}
    command = [sys.executable, "-c", PROGRAM, str(run), *words]
    return subprocess.run(command, env=values, capture_output=True, text=True, check=False, timeout=120)


def test_a_run_is_sent_once_with_answers_of_its_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    append(run, rows(2, 4))
    for _ in range(2):
        done = track(run, "--to", "tensorboard")
        assert done.returncode == 0, done.stderr
    assert (run / "sent.jsonl").read_text().splitlines() == ["[1, 0, true]", "[2, 2, false]"]
    cursor = CursorFile(run, "tensorboard").read()
    assert cursor is not None
    assert (cursor.line, cursor.behind, cursor.run_id) == (3, 0, "run")


def test_a_tracker_that_refuses_is_status_1_with_its_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    done = track(run, "--to", "tensorboard", REFUSES="1")
    assert done.returncode == 1
    assert "ConnectionError: no route" in done.stderr.splitlines()[-1]
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "no tracker is named: use --to"),
        (["--to", "tensorboard", "--to", "wandb", "--follow"], "--follow is for one tracker"),
        (["--to", "tensorboard", "--set", "trackers.nonsense=1"], "trackers.nonsense"),
    ],
)
def test_a_command_that_cannot_work_says_why(words: list[str], text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    done = track(run, *words)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.parametrize("left", ["nothing", "settings alone", "nothing but a file"])
def test_a_directory_without_a_run_is_status_2_and_is_left_alone(left: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if left == "settings alone":
        write_evaluated_run(run)
        for path in run.iterdir():
            if path.is_file() and path.name != "settings.json":
                path.unlink()
    elif left == "nothing but a file":
        run.write_text("not TOML")
    before = sorted(tmp_path.rglob("*"))
    done = track(run, "--to", "tensorboard")
    assert done.returncode == 2, done.stderr
    assert str(run) in done.stderr
    assert {path for path in tmp_path.rglob("*") if path.name != "own_client.py" and "__pycache__" not in str(path)} == set(
        before
    )


def test_a_client_that_is_not_installed_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="wandb is not installed here: pip install wandb"):
        find_client("wandb")
    settings = override_settings(Settings(), ["trackers.to=['mlflow']"])
    with pytest.raises(ConfigurationError, match="pip install mlflow"):
        tracker_specs(settings, ["run.toml"])


def test_each_tracker_has_a_process_of_its_own_that_the_run_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    settings = override_settings(Settings(), ["trackers.to=['wandb', 'trackio']"])
    first, second = tracker_specs(settings, ["run.toml", "--set", "a.b=1"])
    assert first.arguments == ("run.toml", "--set", "a.b=1", "--to", "wandb", "--follow")
    assert (first.name, second.name) == ("tracker-wandb", "tracker-trackio")
    assert (first.is_essential, first.ends_by_itself, first.stop_order) == (False, False, 3)
    assert tracker_specs(Settings(), []) == []


def test_names_of_trackers_are_those_of_the_settings() -> None:
    override_settings(Settings(), [f"trackers.to={list(CLIENTS)}"])
    with pytest.raises(ConfigurationError, match=r"trackers\.to"):
        override_settings(Settings(), ["trackers.to=['neptune']"])
    with pytest.raises(ConfigurationError, match="name each tracker once"):
        override_settings(Settings(), ["trackers.to=['mlflow', 'mlflow']"])


def test_a_run_that_cannot_be_written_is_named_with_the_way_out_and_stays_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    (run / "trackers").write_text("in the way, as a read-only disk would be")
    done = track(run, "--to", "tensorboard")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{run / 'trackers'} cannot be written (File exists)" in done.stderr
    assert "send a copy of the run's directory" in done.stderr
    assert not (run / "sent.jsonl").exists()
