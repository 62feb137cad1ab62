"""``gspo eval`` with real SGLang: killed, it goes on and takes no sample twice."""

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.shared.runtime.errors import EXIT_INTERRUPTED
from gspo_services.shared.runtime.lifecycle import module_command
from tests.support.processes.run_process import POLL_S, REPOSITORY

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

PATIENCE_S = 60.0
CONFIG = """
[environment]
name = "arithmetic"
[sampling]
max_turn_tokens = 8
max_tokens = 64
[evaluation.sets.small]
options = { max_operand = 9 }
num_tasks = 12
samples = 16
temperature = 0.8
top_p = 0.9
metrics = ["avg@16", "pass@4", "maj@16"]
[evaluation.sets.greedy]
num_tasks = 5
temperature = 0
[rollout]
max_running = 2
max_total_tokens = 16384
"""


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_evaluation_goes_on_and_takes_no_sample_twice(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny", num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    (tmp_path / "my.toml").write_text(CONFIG)
    command = module_command("gspo_services.cli.main", "eval", "my.toml", "--model", "tiny", "--out", "out")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    path, nothing = tmp_path / "out" / "tiny" / "small.jsonl", threading.Event()
    for enough, end, status in ((5, signal.SIGTERM, EXIT_INTERRUPTED), (20, signal.SIGKILL, -signal.SIGKILL)):
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, stderr=subprocess.PIPE)
        assert first.stderr is not None
        with first, first.stderr as errors:
            # Each sample is in the file before the next one begins, so the file grows while the command runs.
            errors.readline()  # SGLang starts.
            while first.poll() is None and (not path.is_file() or path.read_bytes().count(b"\n") < enough):
                nothing.wait(POLL_S)
            assert first.poll() is None, errors.read().decode()
            os.kill(first.pid, end)
            assert first.wait(PATIENCE_S) == status
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 20 <= kept.count(b"\n") < 12 * 16, "the kill came too late to say anything"

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(kept)
    samples = Counter((line["task"], line["sample"]) for line in lines_of(path)[1:])
    assert samples == {(task, number): 1 for task in range(12) for number in range(16)}

    # The same command once more has nothing to do, and says the same.
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert again.stdout == done.stdout
    assert "SGLang" not in again.stderr
    results = {(line["set"], line["metric"]): line for line in lines_of(tmp_path / "out" / "results.jsonl")}
    solved = [line["reward"] == 1.0 for line in lines_of(path)[1:]]
    assert results["small", "avg@16"]["value"] == pytest.approx(sum(solved) / len(solved))
    assert results["greedy", "reward"]["num_tasks"] == 5
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
