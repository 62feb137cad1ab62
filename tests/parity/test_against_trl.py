"""The comparison with TRL compares like with like: prompts, rewards, steps, clip and optimizer are as configured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.against_trl.theirs import read_theirs
from gspo_services.prepare.tiny_models.tiny import build_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.sections import Settings
from gspo_services.tasks.environments.registry import create_environment

pytestmark = pytest.mark.parity

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic.toml"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The example, with small batches and an untrained model."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    build_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    small = ["run.num_batches=2", "evaluation.every_batches=2", "evaluation.num_tasks=16", "batch.groups_per_batch=8"]
    return load_settings(EXAMPLE, [*small, f"model.path={directory}"])


def test_both_are_asked_the_same_prompts_token_by_token_in_the_same_order(settings: Settings) -> None:
    from transformers import AutoTokenizer

    from benchmarks.against_trl.trl_run import task_rows

    environment = create_environment("arithmetic", {})
    theirs = AutoTokenizer.from_pretrained(settings.model.path)
    ours = ChatTokenizer(settings.model.path)
    for split in ("train", "eval"):
        source = environment.tasks(split)
        for index, row in enumerate(task_rows(environment, split, 50)):
            start = environment.start(source.task(index), seed=index)
            text = theirs.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            assert theirs(text, add_special_tokens=False)["input_ids"] == ours.prompt_ids(start.messages)
            assert json.loads(row["state"]) == start.state
    assert theirs.eos_token_id in ours.stop_ids


def test_trl_is_set_to_the_batch_the_objective_and_the_optimizer_of_the_configuration(tmp_path: Path) -> None:
    from benchmarks.against_trl.trl_run import grpo_config

    config = grpo_config(load_settings(EXAMPLE, []), tmp_path)
    assert config.generation_batch_size == 256
    assert (config.per_device_train_batch_size, config.steps_per_generation, config.num_iterations) == (64, 4, 1)
    assert (config.num_generations, config.max_steps) == (8, 60 * 4)
    assert (config.importance_sampling_level, config.epsilon, config.epsilon_high, config.beta) == (
        "sequence",
        9e-3,
        1.2e-2,
        0,
    )
    assert (config.learning_rate, config.adam_beta1, config.adam_beta2, config.weight_decay) == (2e-4, 0.9, 0.95, 0)
    assert (config.max_grad_norm, config.max_completion_length, config.temperature) == (1.0, 8, 1.0)
    assert (config.lr_scheduler_type, config.warmup_steps) == ("constant_with_warmup", 0)
    smaller = grpo_config(load_settings(EXAMPLE, []), tmp_path, 16)
    assert (smaller.generation_batch_size, smaller.max_steps) == (256, 60 * 4)
    assert (smaller.per_device_train_batch_size, smaller.gradient_accumulation_steps) == (16, 4)
    with pytest.raises(ValueError, match="micro_batch is 24, an optimizer step has 64 samples"):
        grpo_config(load_settings(EXAMPLE, []), tmp_path, 24)


def test_a_run_of_trl_trains_every_batch_and_evaluates_at_the_start_and_when_it_is_due(
    settings: Settings, tmp_path: Path
) -> None:
    from benchmarks.against_trl.trl_run import Record, train

    path = tmp_path / "record.jsonl"
    train(settings, Record(path), tmp_path / "scratch")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["event"], row.get("batch")) for row in rows] == [
        ("begin", None),
        ("eval", 0),
        ("batch", 1),
        ("batch", 2),
        ("eval", 2),
        ("end", None),
    ]
    # Untrained answers reach the maximum length; a few end early by chance.
    assert 2 * 64 * 7 < rows[-1]["generated_tokens"] <= 2 * 64 * 8
    prompts = rows[-1]["packed_tokens"] - rows[-1]["generated_tokens"]
    assert 2 * 64 * 6 <= prompts <= 2 * 64 * 9
    run = read_theirs(rows, setting="1 thread", seed=0, samples_per_batch=64)
    assert [each.samples for each in run.points] == [0, 128]
    assert 0 < run.batch_parts["generation"] < run.seconds
    assert sum(run.batch_parts.values()) * 2 == pytest.approx(run.seconds)
    # Where a batch has several optimizer steps, TRL computes the log-probs of its start, as this project does.
    assert 0 < run.batch_parts["old log-probs"] < run.batch_parts["training"]
    assert rows[-1]["packed_tokens"] < rows[-1]["padded_tokens"] <= 2 * 64 * (9 + 8)


def test_a_run_of_trl_may_end_at_the_target(settings: Settings, tmp_path: Path) -> None:
    from benchmarks.against_trl.trl_run import Record, train

    every = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"every_batches": 1})})
    train(every, Record(tmp_path / "record.jsonl"), tmp_path / "scratch", until=0.0)
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["begin", "eval", "batch", "eval", "end"]


def test_the_reward_of_an_answer_is_that_of_the_environment() -> None:
    from benchmarks.against_trl.trl_run import reward_of

    environment = create_environment("arithmetic", {})
    assert reward_of(environment, {"problem": "12+7"}, "19") == 1.0
    assert reward_of(environment, {"problem": "12+7"}, "18") == 0.0


def test_the_reward_of_rows_is_that_of_their_grader_as_a_run_weighs_it(tmp_path: Path) -> None:
    from benchmarks.against_trl.trl_run import reward_of

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "2 + 3", "answer": "5"}) + "\n")
    columns = {"train_path": str(rows), "eval_path": str(rows), "prompt_column": "question", "answer_column": "answer"}
    environment = create_environment("dataset", {**columns, "answer_marker": "", "kind": "number"})
    state = environment.start(environment.tasks("eval").task(0), seed=0).state
    # The grader also counts answers without a number, which are worth nothing.
    assert [reward_of(environment, state, said) for said in ("It is 5.", "It is 6.", "No.")] == [1.0, 0.0, 0.0]
