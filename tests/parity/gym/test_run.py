"""A whole run without data: a tiny model learns to answer, and its tasks get harder. Then `gspo eval` and the audit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.shared.runtime.lifecycle import module_command

pytestmark = [pytest.mark.parity, pytest.mark.timeout(1800)]
pytest.importorskip("reasoning_gym")

CONFIGURATION = """
[run]
directory = "run"
num_batches = 16
[model]
path = "model"
[environment]
name = "reasoning_gym"
[environment.options]
generators = "syllogism"
curriculum = { raise_at = 0.45, lower_at = 0.05 }
answer_form = "whole"
system_prompt = ""
num_eval_tasks = 32
[sampling]
max_turn_tokens = 8
max_tokens = 256
[batch]
groups_per_batch = 16
mini_batches = 2
max_lag = 1
[evaluation]
every_batches = 7
num_tasks = 32
[rollout]
num_servers = 1
max_running = 64
max_total_tokens = 32768
[learner]
learning_rate = 1e-3
"""
LEARNT = 0.1
"""It begins at 0.2, for it says no Yes or No in three of five answers, and comes to 0.5 when it always does. A mean of two
batches of 16 questions has a standard error of 0.035, one of four 0.025. Seeds 0 and 1 gave 0.23 and 0.21 more."""


def gspo(folder: Path, *words: str) -> str:
    done = subprocess.run(
        module_command("gspo_services.cli.main", *words), cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_run_without_data_climbs(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path / "model", environments=["tests.parity.gym.guesses:Guesses"], num_steps=120, num_eval_episodes=8,
        progress=lambda _: None,
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    gspo(tmp_path, "run", "run.toml")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    batches = [line for line in lines if line["event"] == "batch"]
    changes = [line for line in lines if line["event"] == "level"]
    assert batches[0]["level/syllogism"] == 0
    assert batches[-1]["level/syllogism"] >= 1
    assert changes[0] | {"level": 1, "ladder": "syllogism"} == changes[0]
    assert changes[0]["solve_rate"] >= 0.45
    rewards = [batch["train/reward"] for batch in batches]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + LEARNT
    assert all(batch["train/reward/unscored"] == 0 for batch in batches)
    gspo(tmp_path, "audit", "run")
    assert "held-out" in gspo(tmp_path, "eval", "run.toml", "--tasks", "16", "--samples", "2", "--out", "scores")
