"""Runs on rows as they are published, and their evaluation, with real engines. ``make test-demo``."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gspo_services.broker.store import reading
from gspo_services.prepare.init.command import main as init
from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.shared.runtime.lifecycle import module_command
from tests.support.broker.ledger_audit import audit
from tests.support.files.public_data import PUBLIC_DATA
from tests.support.files.public_forms import FORMS, NUM_ROWS
from tests.support.processes.run_process import REPOSITORY, RunProcess

MATH_500 = PUBLIC_DATA / "math500" / "test.jsonl"
pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]
SMALL = (
    "run.num_batches=2", "batch.group_size=2", f"batch.groups_per_batch={len(FORMS)}", "batch.mini_batches=1",
    "sampling.max_turn_tokens=8", "sampling.max_tokens=1024", "rollout.num_servers=1", "rollout.max_running=8",
    "rollout.max_total_tokens=16384", "evaluation.every_batches=0", "learner.max_tokens_per_micro_batch=4096",
)  # fmt: skip
CONFIG = """
[model]
path = "tiny"
[sampling]
max_turn_tokens = 8
max_tokens = 1024
[rollout]
max_running = 8
max_total_tokens = 16384
[environment]
name = "dataset"
[environment.options]
sources = {sources}
[evaluation.sets.published]
split = "train"
"""


def test_every_published_form_is_trained_on_and_evaluated(tmp_path: Path) -> None:
    model, directory = tmp_path / "tiny", tmp_path / "run"
    make_tiny_model(model, num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    paths = {name: str(form.written(tmp_path / name)) for name, form in FORMS.items()}
    sources = (
        "[" + ", ".join(f"{{ path = {json.dumps(path)}, name = {json.dumps(name)} }}" for name, path in paths.items()) + "]"
    )
    own = ("environment.name=dataset", f"environment.options={{ sources = {sources} }}", f"model.path={model}")
    with RunProcess(REPOSITORY / "examples/arithmetic.toml", directory, *SMALL, *own) as run:
        assert run.wait_finished(900) == 0, run.tail()
    assert audit(directory).problems == []
    with reading(directory) as connection:
        drawn = [task for (task,) in connection.execute("SELECT task_index FROM groups WHERE split = 'train'")]
    assert {index // NUM_ROWS for index in drawn} == set(range(len(FORMS))), (
        "equal weights: each batch asks each source once"
    )
    _evaluated(tmp_path, sources)


def _evaluated(folder: Path, sources: str) -> None:
    """Each sample has the score that its text has when it is graded here."""
    (folder / "my.toml").write_text(CONFIG.format(sources=sources))
    samples = _samples(folder, "my.toml", "published")
    assert {sample["task"] for sample in samples} == set(range(NUM_ROWS * len(FORMS)))


def _samples(folder: Path, config: str, name: str) -> list[dict[str, Any]]:
    """Those of an evaluation set, when ``gspo eval`` is given in ``folder``; each has a reward."""
    command = module_command("gspo_services.cli.main", "eval", config, "--out", "out")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    lines = (folder / "out" / "tiny" / f"{name}.jsonl").read_text().splitlines()[1:]
    samples: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [sample["failure"] for sample in samples if sample["reward"] is None] == []
    return samples


@pytest.mark.parametrize("data", [[], ["--data", str(MATH_500)]], ids=["samples", "math500"])
def test_a_newcomers_project_of_mathematics_trains_and_is_evaluated(data: list[str], tmp_path: Path) -> None:
    if data and not MATH_500.is_file():
        pytest.skip(f"no MATH-500 in {MATH_500.parent} (set GSPO_DATA_DIR)")
    project = tmp_path / "mine"
    assert init([str(project), "--kind", "maths", *data]) == 0
    make_tiny_model(project / "models" / "tiny", num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    # All else is as it was written: room for prompts and answers, the layout, how answers are read.
    few = (
        "run.num_batches=2", "batch.group_size=2", "batch.groups_per_batch=4", "batch.mini_batches=1",
        "rollout.num_servers=1", "rollout.max_running=8", "evaluation.every_batches=2",
    )  # fmt: skip
    with RunProcess(Path("run.toml"), project / "runs" / "first", *few, folder=project) as run:
        assert run.wait_finished(900) == 0, run.tail()
        (row, *_) = run.rows("eval")
    assert audit(project / "runs" / "first").problems == []
    assert {sample["task"] for sample in _samples(project, "run.toml", "held-out")} == set(range(row["num_finished"]))
