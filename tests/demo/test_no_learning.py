"""Runs that cannot learn, each for another reason, are named within five batches; one without a signal stops.
``make test-demo``; lines of such runs are in ``tests/unit/services/shared/learning/recorded/``.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.learning import LearningWatch, counted_components
from tests.support.processes.run_process import REPOSITORY, RunProcess

pytestmark = [pytest.mark.demo, pytest.mark.timeout(900)]
DEMO = REPOSITORY / "examples" / "arithmetic.toml"
SMALL = (
    "run.num_batches=8", "batch.groups_per_batch=8", "rollout.num_servers=1", "rollout.max_running=64",
    "evaluation.every_batches=0", f"model.path={REPOSITORY / 'models' / 'tiny'}",
)  # fmt: skip
WEIGHTS = {"right": 1.0, "digits": 0.2}
REWARDS = """
def parts(completion, task):
    wanted = str(task["answer"])
    same = sum(ours == theirs for ours, theirs in zip(reversed(completion), reversed(wanted)))
    return {"right": float(completion == f"answer: {wanted}"), "digits": same / max(len(wanted), len(completion))}
"""


def a_project(folder: Path) -> list[str]:
    """Sums whose rows have a number that is not their answer; returns the settings that read them."""
    folder.mkdir(exist_ok=True)
    sums = [(left, right) for left in range(10, 50) for right in range(10, 30)]
    rows = [{"question": f"{left}+{right}=", "answer": str(left + right), "id": str(7000 + left)} for left, right in sums]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    options = [f"train_path={folder / 'train.jsonl'}", "system_prompt="]
    return ["environment.name=dataset", *(f"environment.options.{each}" for each in options)]


def first_batch(rows: list[dict[str, Any]], name: str, options: dict[str, Any]) -> int:
    """The batch after which the finding was there."""
    watch = LearningWatch(counted_components(options, None))
    for row in rows:
        watch.take(row)
        if name in {each.name for each in watch.findings}:
            return int(row["batch"])
    raise AssertionError(f"{name} was not found in {len(rows)} batches")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("no_effect", ["learner.learning_rate=1e-12"]),
        ("cut_off", ["sampling.max_turn_tokens=1"]),
        ("entropy", ["learner.learning_rate=0.3"]),
        (
            "one_component",
            ["environment.options.reward=rewards:parts", "environment.options.reward_weights={right=1.0,digits=0.2}"],
        ),
    ],
)
def test_a_run_that_cannot_learn_is_named(name: str, settings: list[str], tmp_path: Path) -> None:
    project = a_project(tmp_path / "project") if name == "one_component" else []
    folder = tmp_path / "project" if project else REPOSITORY
    with RunProcess(DEMO, tmp_path / "run", *SMALL, *project, *settings, folder=folder) as run:
        assert run.wait_finished(600) == 0, run.tail()
    visible = 3 if name == "entropy" else 0
    assert first_batch(run.rows("batch"), name, {"reward_weights": WEIGHTS}) - visible <= 5
    assert "! " in run.output.read_text()


def test_a_run_without_a_signal_stops_and_says_so_and_the_same_command_continues_it(tmp_path: Path) -> None:
    wrong_column = [*a_project(tmp_path / "project"), "environment.options.answer_column=id"]
    stopping = [*SMALL, "run.num_batches=20", "run.stop_without_signal_batches=4", *wrong_column]
    directory = tmp_path / "run"
    former = 0
    for _ in range(2):
        with RunProcess(DEMO, directory, *stopping) as run:
            assert run.wait_finished(600) == 1, run.tail()
        number = len(run.rows("batch"))
        assert number - former in (4, 5)  # The learner may have asked for the next batch by then.
        former = number
        output = run.output.read_text()
        assert "no answer of the last 4 batches had an advantage (run.stop_without_signal_batches = 4)" in output
        assert "! no signal: every answer was wrong (reward 0)" in output
        assert f"no: the reward was 0 in all {64 * number} answers of {number} batches" in output
    doctor = [sys.executable, "-m", "gspo_services.cli.main", "doctor", str(directory)]
    said = subprocess.run(doctor, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=False)
    assert said.returncode == 1
    assert "no signal: every answer was wrong (reward 0)" in said.stdout
    assert said.stdout.count("an answer of the newest batch: ") == 3
    assert "expected 70" in said.stdout
