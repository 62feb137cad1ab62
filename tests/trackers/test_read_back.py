"""What each tracker has is what metrics.jsonl has: every number once, also after kill -9 and a resumed run."""

import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.track.names import tracker_names
from tests.support.processes.evaluated_run import append, rows, write_evaluated_run
from tests.trackers.reading import READERS, as_json, command, environment

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.timeout(1800),
    # The clients' own, about libraries of theirs.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
FLOAT32_SHARE = 6e-8
"""TensorBoard keeps float32."""


def expected(lines: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The first value of each measure at each step."""
    found: dict[tuple[str, int], float] = {}
    for line in lines:
        if line["event"] in ("batch", "eval"):
            for key, name in tracker_names(line, line["event"]).items():
                if isinstance(line[key], int | float):
                    found.setdefault((name, line["batch"]), float(line[key]))
    return found


def wait_until_sent(cursor: Path, line: int, process: subprocess.Popen[bytes]) -> None:
    nothing = threading.Event()
    while as_json(cursor).get("line", 0) < line:
        assert process.poll() is None, "it ended by itself"
        nothing.wait(0.02)


@pytest.mark.parametrize("tracker", READERS)
def test_every_number_is_there_once_after_kill_9_and_a_resumed_run(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cursor = tmp_path / "a run", tmp_path / "a run/trackers" / f"{tracker}.json"
    write_evaluated_run(run, "trackers.project=a project", "trackers.samples=2")
    monkeypatch.chdir(tmp_path)  # MLflow's local files are below the working directory.
    # W&B leaves its temporary folders where a process is killed, and in this one, which reads with its code, to the end.
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name, value in environment(tmp_path, PYTHONPATH=str(ROOT)).items():
        monkeypatch.setenv(name, value)
    lines = [as_json(run / "metrics.jsonl"), *rows(2, 400)]
    append(run, lines[1:150])
    begun = subprocess.Popen(command(run, tracker, "--follow"), cwd=tmp_path)
    try:
        wait_until_sent(cursor, 150, begun)
        append(run, lines[150:300])
        wait_until_sent(cursor, 151, begun)
    finally:
        begun.send_signal(signal.SIGKILL)
        begun.wait()
    append(run, lines[300:])
    subprocess.run(command(run, tracker), cwd=tmp_path, check=True, timeout=600)
    subprocess.run(command(run, tracker), cwd=tmp_path, check=True, timeout=600)

    note = as_json(cursor)
    assert (note["line"], note["error"], note["run_id"]) == (399, "", "run")
    stored = READERS[tracker](run, note["tracker_run"])
    wanted = expected(lines)
    assert len(wanted) > 1000
    doubled = {place: values for place, values in stored.values.items() if len(values) != 1}
    assert not doubled
    share = FLOAT32_SHARE if tracker == "tensorboard" else 0.0
    found = {place: stored.values[place][0] for place in wanted if place in stored.values}
    assert found == pytest.approx(wanted, rel=share, abs=0.0)
    others = {name for name, _ in stored.values.keys() - wanted.keys()}
    assert others <= {"progress/line", "events/dropped", "events/dropped_stale", "events/trained_again"}
    assert str(stored.settings["batch.max_lag"]) in ("2", "2.0")
    release = stored.settings.get("release", stored.settings.get("code.release", ""))
    assert release
    assert '"done"' in stored.samples or "| done |" in stored.samples, "answers of the evaluation"


def test_a_client_that_is_not_installed_or_refuses_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_evaluated_run(run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file() and path.suffix != "-lock"}
    values = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **environment(tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"),
    }
    done = subprocess.run(command(run, "mlflow"), cwd=tmp_path, env=values, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "127.0.0.1" in done.stderr.splitlines()[-1]
    assert "stopped_by_error" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name in before} == before
