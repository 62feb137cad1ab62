"""A run whose rollouts share a reward model, beside a function of verl's; its process is killed. ``make test-faults``."""

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from gspo_services.tasks.reward_model import ModelScore, RewardModel, RewardModelOptions, client
from gspo_services.tasks.reward_model.wire import read_message
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import RunProcess
from tests.support.rewards.classifiers import save_classifier

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
MODEL = "gspo_services.tasks.reward_model"
CONFIG = """
[environment]
name = "dataset"
[environment.options]
train_path = "{rows}"
eval_path = "{rows}"
prompt_column = "prompt"
answer_column = "reward_model.ground_truth"
answer_marker = ""
system_prompt = ""
reward = "tests.support.rewards.foreign:compute_score"
reward_form = "verl"
reward_deadline_s = 120
[reward]
model = "{classifier}"
model_weight = 0.1
[model]
path = "{model}"
[sampling]
max_turn_tokens = 8
max_tokens = 64
[batch]
group_size = 4
groups_per_batch = 4
mini_batches = 1
[evaluation]
every_batches = 4
num_tasks = 8
[rollout]
num_servers = 2
max_running = 16
max_total_tokens = 4096
"""


def models_of(pid: int) -> list[psutil.Process]:
    """The processes of reward models below one."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if MODEL in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


async def many_scores(model: RewardModel, number: int) -> list[ModelScore]:
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(model.score([{"role": "user", "content": "x" * each}]), name=f"score-{each}")
            for each in range(number)
        ]
    return [task.result() for task in asked]


def requests_sent(monkeypatch: pytest.MonkeyPatch, number: int) -> asyncio.Event:
    """Set as soon as so many requests from now on are in the socket."""
    all_sent, numbers = asyncio.Event(), itertools.count(1)

    async def waits_for_answer(stream: asyncio.StreamReader) -> dict[str, Any]:
        if next(numbers) == number:
            all_sent.set()
        return await read_message(stream)

    monkeypatch.setattr(client, read_message.__name__, waits_for_answer)
    return all_sent


async def test_a_kill_of_the_process_costs_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RewardModelOptions(path=str(save_classifier(tmp_path)), owner=str(tmp_path))
    async with RewardModel(options) as first, RewardModel(options) as second:
        (process,) = models_of(os.getpid())
        before = await many_scores(first, 40)
        # Suspended, it holds what both ask; then it is gone.
        process.suspend()
        all_sent = requests_sent(monkeypatch, 80)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(many_scores(model, 40), name="scores") for model in (first, second)]
            await all_sent.wait()
            assert not any(task.done() for task in asked)
            process.kill()
        for task in asked:
            assert [each.score for each in task.result()] == pytest.approx([each.score for each in before], abs=1e-4)
        (following,) = models_of(os.getpid())
        assert following.pid != process.pid
    assert models_of(os.getpid()) == []


def test_rollouts_share_a_reward_model_whose_kills_cost_no_attempt(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", num_steps=3, num_eval_episodes=1, progress=lambda _: None)
    save_classifier(tmp_path / "classifier")
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({
            "data_source": "math_dapo", "prompt": [{"role": "user", "content": f"{number}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)}, "extra_info": {"index": number},
        }) + "\n" for number in range(40)
    ))  # fmt: skip
    config = tmp_path / "my.toml"
    config.write_text(
        CONFIG.format(rows=tmp_path / "rows.jsonl", classifier=tmp_path / "classifier", model=tmp_path / "model")
    )
    with RunProcess(config, tmp_path / "run", "run.num_batches=8") as run:
        for number in (2, 4):
            run.wait_until(f"batch {number}", lambda number=number: len(run.rows("batch")) >= number, 900)  # type: ignore[misc]
            (model,) = models_of(run.process.pid)
            model.kill()
        assert run.wait_finished(900) == 0, run.tail()
        assert run.leftovers() == []
        restarts = [row for name in ("rollout-0", "rollout-1") for row in run.events(name, "reward_model_ready")]
    assert len(restarts) >= 3, "one at the start, one after each kill"
    report = audit(tmp_path / "run")
    assert (report.problems, report.num_batches, report.dropped) == ([], 8, {})
    for row in run.rows("batch"):
        parts = {name: row[f"train/reward/{name}"] for name in ("score", "acc", "model")}
        assert row["train/reward"] == pytest.approx(parts["score"] + 0.1 * parts["model"], abs=1e-4)
        assert parts["score"] == pytest.approx(2 * parts["acc"] - 1, abs=1e-4)
    assert len({row["train/reward/model"] for row in run.rows("batch")}) > 1
