"""The second program of docs/guide/python.md: a real run from a script. ``make test-demo``."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo.runs import BatchMetrics, HeldOut, Run
from tests.support.pages import shown
from tests.support.processes.ports import free_ports
from tests.support.processes.run_process import REPOSITORY

pytestmark = [pytest.mark.demo, pytest.mark.timeout(900)]


def test_a_script_starts_watches_and_exports_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("examples", "models"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    work, batch, weights, broker, learner, rollout, other = free_ports(7)
    for key, value in {
        "BROKER__WORK_ENDPOINT": f"tcp://127.0.0.1:{work}",
        "BROKER__BATCH_ENDPOINT": f"tcp://127.0.0.1:{batch}",
        "LEARNER__WEIGHTS_ENDPOINT": f"tcp://127.0.0.1:{weights}",
        "BROKER__METRICS_PORT": str(broker),
        "LEARNER__METRICS_PORT": str(learner),
        "ROLLOUT__METRICS_PORT": str(min(rollout, other)),
        "ROLLOUT__NUM_SERVERS": "1",
    }.items():
        monkeypatch.setenv(f"GSPO_{key}", value)
    names: dict[str, object] = {}
    program = shown("docs/guide/python.md", "from gspo.runs import BatchMetrics")
    exec(compile(program, "python.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == [f"batch {index}" for index in range(10)]
    run = Run.open("runs/short")
    assert not run.is_live
    assert [each.index for each in run.metrics()] == list(range(10))
    assert [type(event) for event in run.watch()].count(BatchMetrics) == 10
    assert isinstance(run.evaluations()[-1], HeldOut)
    assert sum(1 for each in run.trajectories(split="train") if each.status == "finished") >= 10 * 32 * 8
    command = [sys.executable, "-P", "-m", "gspo_services.runs.export", "runs/short", "--to", "model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    own = {path.name: path.read_bytes() for path in Path("runs/short/export").iterdir()}
    assert {name: Path("model", name).read_bytes() for name in own} == own
    assert "with the digest of the version that the engines served" in Path("model/README.md").read_text()
