"""The demo with versions that are adapters, from real parts, in which each process is killed once."""

import json
import math
import random
import struct
from pathlib import Path

import pytest

from gspo_services.prepare.tiny_models.tiny import make_tiny_model
from tests.support.broker.ledger_audit import audit
from tests.support.processes.run_process import REPOSITORY, RunProcess
from tests.support.runs.replayed import assert_replayed_bit_for_bit

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]

NUM_BATCHES = 4
TOLERANCE = 2e-5


def test_a_run_of_adapters_survives_the_end_of_each_process(tmp_path: Path) -> None:
    model, directory = tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, num_steps=250, num_eval_episodes=1, progress=lambda _: None)
    with RunProcess(
        REPOSITORY / "examples/lora.toml",
        directory,
        f"model.path={model}",
        f"run.num_batches={NUM_BATCHES}",
        "rollout.num_servers=1",
        "learner.num_ranks=2",
        "batch.groups_per_batch=8",
        "batch.group_size=4",
        "evaluation.num_tasks=8",
        "evaluation.every_batches=2",
        "learner.checkpoint_every_batches=2",
        'lora.target_modules=["attention"]',
        "lora.publish=adapter",
    ) as run:
        run.kill_each()
        assert run.wait_finished(900) == 0, run.tail()
        assert run.leftovers() == []
    report = audit(directory)
    assert report.problems == []
    assert (report.num_batches, report.num_trained_trajectories, report.dropped) == (NUM_BATCHES, NUM_BATCHES * 32, {})
    rows = run.rows("batch")
    # The engine's log-probs with an adapter equal the learner's, wherever both have the same version.
    assert all(row["mismatch_sigma"] < TOLERANCE for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows), "nothing was learnt, so all versions are the same"
    served = {event["policy_version"] for event in run.events("rollout-0", "adapter_probed")}
    assert len(served) > 1
    assert all(event["mean_difference"] < TOLERANCE for event in run.events("rollout-0", "adapter_probed"))
    whole = weight_bytes(model / "model.safetensors")
    for event in run.events("learner", "published"):
        assert event["num_bytes"] < min(1_000_000, whole / 20)
    assert_replayed_bit_for_bit(directory, tmp_path / "again")


EVEN_AND_ODD = ("even", "odd")


def sums(directory: Path, split: str, number: int) -> None:
    """Every sum twice: once for an even answer, and once for an odd one."""
    drawn = random.Random(split)
    rows = [(drawn.randint(0, 99), drawn.randint(0, 99), kind) for _ in range(number) for kind in EVEN_AND_ODD]
    for kind in ("", *EVEN_AND_ODD):
        lines = [
            json.dumps({"prompt": f"{a}+{b}=", "kind": each, "uid": f"{split}-{place}"})
            for place, (a, b, each) in enumerate(rows)
            if kind in ("", each)
        ]
        (directory / f"{split}{kind and '-' + kind}.jsonl").write_text("\n".join(lines) + "\n")


def test_two_adapters_of_one_run_learn_opposite_tasks_with_the_same_prompts(tmp_path: Path) -> None:
    """One adapter cannot: an answer that is right for one of the two tasks is wrong for the other."""
    model, directory = tmp_path / "model", tmp_path / "run"
    make_tiny_model(model, num_steps=250, num_eval_episodes=1, progress=lambda _: None)
    for split, number in (("train", 300), ("eval", 48)):
        sums(tmp_path, split, number)
    with RunProcess(
        REPOSITORY / "examples/lora.toml",
        directory,
        f"model.path={model}",
        "run.num_batches=16",
        "rollout.num_servers=1",
        "learner.learning_rate=2e-3",
        "learner.checkpoint_every_batches=8",
        "environment.name=dataset",
        f"environment.options.train_path={tmp_path / 'train.jsonl'}",
        f"environment.options.eval_path={tmp_path / 'eval.jsonl'}",
        "environment.options.prompt_column=prompt",
        "environment.options.answer_column=",
        "environment.options.system_prompt=",
        "environment.options.id_column=uid",
        'environment.options.task_columns=["kind"]',
        "environment.options.reward=tests.support.reward_functions:parity",
        *(f"evaluation.sets.{kind}.options.eval_path={tmp_path / f'eval-{kind}.jsonl'}" for kind in EVEN_AND_ODD),
        'lora.target_modules=["attention"]',
        "lora.publish=adapter",
        'lora.adapters=["even", "odd"]',
        "lora.adapter_field=kind",
    ) as run:
        run.kill_each(every_batches=2)
        assert run.wait_finished(900) == 0, run.tail()
    report = audit(directory)
    assert report.problems == []
    trained = {each.adapter: each.trajectories for each in report.outcomes if each.status == "trained"}
    assert set(trained) == set(EVEN_AND_ODD)
    assert sum(trained.values()) == 16 * 32 * 8
    rows = run.rows("batch")
    assert all(row["mismatch_sigma"] < TOLERANCE for row in rows)
    for kind in EVEN_AND_ODD:
        rewards = [row[f"adapter/{kind}/reward"] for row in rows]
        held_out = [row[f"eval/{kind}/reward"] for row in run.rows("evaluation") if f"eval/{kind}/reward" in row]
        print(kind, [round(value, 2) for value in rewards], [round(value, 2) for value in held_out])
        assert held_out[0] < 0.5, "there is something to learn"
        # 0.5 is the most that both tasks could have of one policy.
        assert held_out[-1] > 0.75
        assert sum(rewards[-4:]) / 4 > 0.75
    assert not (directory / "export").exists(), "merged weights would have one of the two"
    assert_replayed_bit_for_bit(directory, tmp_path / "again", 8, 16)


def weight_bytes(path: Path) -> int:
    """The bytes of the tensors of a safetensors file."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return math.floor(path.stat().st_size - 8 - header)
