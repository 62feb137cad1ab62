"""A policy that plays both sides of a game learns to beat the model that it began as. ``make test-demo``."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess

pytestmark = [pytest.mark.demo, pytest.mark.timeout(3600)]
MODEL = REPOSITORY / "models" / "tiny"
NUM_BATCHES = 24
RISE = 0.5
SETTINGS = (
    f"model.path={MODEL}", f"run.num_batches={NUM_BATCHES}", "evaluation.every_batches=6", "evaluation.num_tasks=64",
    "environment.name=rows", "agent.function=examples.self_play_agent:solve", 'agent.roles=["white", "black"]',
    "objective.advantage=role", "batch.groups_per_batch=16", "rollout.num_servers=1",
)  # fmt: skip


def problems(begin: int, end: int) -> list[str]:
    return [f"{10 + number % 40}+{1 + 7 * number % 9}" for number in range(begin, end)]


def answers_of_start_model(questions: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    torch.manual_seed(0)
    said = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        sampled = model.generate(**prompt, do_sample=True, max_new_tokens=8)
        said.append(tokenizer.decode(sampled[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return said


def test_a_policy_that_plays_itself_learns_to_beat_its_start(tmp_path: Path) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(json.dumps({"problem": each}) + "\n" for each in problems(0, 256)))
    questions = problems(1000, 1064)
    rows = zip(questions, answers_of_start_model(questions), strict=True)
    held_out.write_text("".join(json.dumps({"problem": each, "opponent": said}) + "\n" for each, said in rows))
    data = f"environment.options={{train_path = '{train}', eval_path = '{held_out}'}}"
    with RunProcess(REPOSITORY / "examples/arithmetic.toml", tmp_path / "run", *SETTINGS, data) as run:
        assert run.wait_finished(1800) == 0, run.tail()
        rewards = [row["eval/reward"] for row in run.rows("eval")]
    assert audit(tmp_path / "run").problems == []
    assert rewards[-1] >= rewards[0] + RISE, rewards
