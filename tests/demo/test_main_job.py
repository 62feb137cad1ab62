"""Whole runs through all real parts: a model learns. Minutes each; ``make test-demo``."""

from pathlib import Path

import pytest

from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1500)]
MODEL = REPOSITORY / "models" / "tiny"
MODEL_WITH_TOOLS = REPOSITORY / "models" / "tools"
MODEL_OF_PROGRAMS = REPOSITORY / "models" / "programs"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_arithmetic_within_eight_minutes(seed: int, tmp_path: Path) -> None:
    with RunProcess(REPOSITORY / "examples/arithmetic.toml", tmp_path, f"run.seed={seed}", f"model.path={MODEL}") as run:
        assert run.wait_finished(900) == 0, run.tail()
    evals = run.rows("eval")
    ready_s = evals[0]["time_s"] - 30.0
    in_time = [row["eval/reward"] for row in evals if row["time_s"] <= max(0.0, ready_s) + 480]
    assert evals[0]["eval/reward"] <= 0.4
    assert max(in_time) >= 0.85
    report = audit(tmp_path)
    assert report.problems == []
    assert report.dropped == {}


def test_the_calculator_learns_over_several_turns(tmp_path: Path) -> None:
    with RunProcess(REPOSITORY / "examples/calculator.toml", tmp_path, f"model.path={MODEL}") as run:
        assert run.wait_finished(1200) == 0, run.tail()
    evals = [row["eval/reward"] for row in run.rows("eval")]
    assert evals[0] <= 0.4
    assert max(evals) >= 0.7
    batches = run.rows("batch")
    # Observation tokens are in the batch and carry no loss: fewer action tokens than tokens.
    assert all(0 < row["num_action_tokens"] < row["num_tokens"] for row in batches)
    assert audit(tmp_path).problems == []


def test_an_agent_learns_to_use_its_tools_within_eight_minutes(tmp_path: Path) -> None:
    with RunProcess(REPOSITORY / "examples/agent.toml", tmp_path, f"model.path={MODEL_WITH_TOOLS}") as run:
        assert run.wait_finished(1200) == 0, run.tail()
    evals = run.rows("eval")
    in_time = [row["eval/reward"] for row in evals if row["time_s"] <= 480]
    assert evals[0]["eval/reward"] <= 0.4
    assert max(in_time) >= 0.9
    report = audit(tmp_path)
    assert report.problems == []
    assert report.dropped == {}


def test_programs_learn_to_pass_hidden_tests_within_ten_minutes(tmp_path: Path) -> None:
    tasks = MODEL_OF_PROGRAMS / "tasks"
    options = [f"environment.options.{split}_path={tasks}/{split}.jsonl" for split in ("train", "eval")]
    with RunProcess(REPOSITORY / "examples/code.toml", tmp_path, f"model.path={MODEL_OF_PROGRAMS}", *options) as run:
        assert run.wait_finished(1200) == 0, run.tail()
    evals = run.rows("eval")
    in_time = [row["eval/reward"] for row in evals if row["time_s"] <= 600]
    assert evals[0]["eval/reward"] <= 0.4
    assert max(in_time) >= 0.8
    batches = run.rows("batch")
    # Each program has one ending, and the reward is the share of those that were solved.
    endings = ("solved", "no_program", "wrong_answer", "crashed", "limit_cpu", "limit_wall")
    assert all(0.99 <= sum(row[f"train/reward/{name}"] for name in endings) <= 1.0001 for row in batches)
    assert all(row["train/reward"] == row["train/reward/solved"] for row in batches)
    report = audit(tmp_path)
    assert report.problems == []
    assert report.dropped == {}
