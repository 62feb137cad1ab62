"""One run of TRL's GRPOTrainer on a configuration of this project: ``python -m benchmarks.against_trl.trl_run``.

It is what a user of TRL would set up on a machine without a GPU: one process that generates with transformers'
``generate`` (vLLM needs a GPU, and transformers' continuous batching took some fifty times the CPU), scores, and trains, in
turns. The configuration gives model, tasks and their order, prompt ids, reward, samples of a batch, optimizer steps,
optimizer, learning rate, clip and evaluation. TRL has no mini-batches of whole groups (it shuffles the samples of a batch).
All measurements go to a JSONL file, one event per line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

# transformers' tokenizers load it where it is installed. It is not needed here, and sentencepiece 0.2.1 crashes an
# interpreter that exits normally (a segmentation fault in the destructor of its type capsule).
sys.modules["sentencepiece"] = None  # type: ignore[assignment]

import psutil  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from gspo.tasks.environments import Environment, RewardJob, Split  # noqa: E402
from gspo_services.shared.settings import Settings, load_settings  # noqa: E402
from gspo_services.tasks.environments import create_environment  # noqa: E402

PhaseName = Literal["generation", "old log-probs", "evaluation"]


@dataclass
class Phases:
    """Seconds, CPU seconds and tokens of the run so far, by phase."""

    seconds: dict[PhaseName, float] = field(default_factory=dict)
    cpu_s: dict[PhaseName, float] = field(default_factory=dict)
    generated_tokens: int = 0
    packed_tokens: int = 0
    """Prompt and answer tokens of the generated samples."""
    padded_tokens: int = 0
    """The same in rows padded to the longest prompt and longest answer of a batch, as TRL trains them."""

    @contextmanager
    def at(self, phase: PhaseName) -> Iterator[None]:
        """Time one phase."""
        begin, cpu_begin = time.monotonic(), time.process_time()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - begin
        self.cpu_s[phase] = self.cpu_s.get(phase, 0.0) + time.process_time() - cpu_begin

    def generated(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Count the tokens of one batch of samples."""
        num_generated = sum(len(ids) for ids in answers)
        self.generated_tokens += num_generated
        self.packed_tokens += num_generated + sum(len(ids) for ids in prompts)
        self.padded_tokens += len(answers) * (max(len(ids) for ids in prompts) + max(len(ids) for ids in answers))


@dataclass
class Record:
    """The JSONL file; seconds count from the start of training."""

    path: Path
    phases: Phases = field(default_factory=Phases)
    begin: float = 0.0

    def write(self, event: str, **values: float | str) -> None:
        line = {
            "event": event,
            "seconds": time.monotonic() - self.begin,
            "seconds_of": self.phases.seconds,
            "cpu_seconds_of": self.phases.cpu_s,
            "generated_tokens": self.phases.generated_tokens,
            "packed_tokens": self.phases.packed_tokens,
            "padded_tokens": self.phases.padded_tokens,
            "cpu_s": time.process_time(),
            **values,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, with clocks around generation and around the log-probs that it computes without a gradient."""

    record: Record

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        with self.record.phases.at("generation"):
            answers = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.record.phases.generated(prompt_ids, answers[0])
        return answers

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.record.phases.at("old log-probs"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@dataclass
class Evaluation(TrainerCallback):  # type: ignore[misc]
    """Evaluates held-out tasks, sampled as in training, at the start and every few batches."""

    settings: Settings
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    record: Record
    until: float | None = None
    """Training ends with the first evaluation that has this reward; None: after all batches."""
    batch: int = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.record.begin = time.monotonic()
        self.record.write("begin", start_s=datetime.now().timestamp() - psutil.Process().create_time())
        if self.settings.evaluation.every_batches:
            self._evaluate(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.batch, rest = divmod(state.global_step, self.settings.batch.mini_batches)
        if rest == 0:
            self.record.write("batch", batch=self.batch)
            every = self.settings.evaluation.every_batches
            if every and self.batch % every == 0:
                reward = self._evaluate(kwargs["model"])
                control.should_training_stop |= self.until is not None and reward >= self.until

    def _evaluate(self, model: Any) -> float:
        with self.record.phases.at("evaluation"):
            reward = held_out_reward(model, self.tokenizer, self.environment, self.settings)
        evaluation_s = self.record.phases.seconds["evaluation"]
        self.record.write("eval", batch=self.batch, reward=reward, evaluation_s=evaluation_s)
        return reward


@torch.no_grad()
def held_out_reward(model: Any, tokenizer: PreTrainedTokenizerBase, environment: Environment, settings: Settings) -> float:
    """Return the mean reward of the first ``evaluation.num_tasks`` held-out tasks, one sample each in one ``generate``."""
    rows = task_rows(environment, "eval", settings.evaluation.num_tasks)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    sampling = GenerationConfig(
        max_new_tokens=settings.sampling.max_turn_tokens,
        do_sample=True,
        temperature=settings.sampling.temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    was_training = model.training
    model.eval()
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=sampling
    )
    model.train(was_training)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [reward_of(environment, json.loads(row["state"]), text) for row, text in zip(rows, answers, strict=True)]
    return sum(rewards) / len(rewards)


def task_rows(environment: Environment, split: Split, num_tasks: int) -> list[dict[str, Any]]:
    """Return the first tasks of the split as rows of TRL's data set: an episode's first messages, and its state.

    Where the split has fewer, they come again.
    """
    source = environment.tasks(split)
    places = (index % (source.num_tasks or num_tasks) for index in range(num_tasks))
    starts = [environment.start(source.task(place), seed=0) for place in places]
    return [{"prompt": list(start.messages), "state": json.dumps(start.state)} for start in starts]


def reward_of(environment: Environment, state: Any, answer: str) -> float:
    """Return the environment's reward of one turn: of a job, in this process, as a TRL reward function is called.

    Raises: ValueError for a job that is no plain function, or a task that it wants.
    """
    reward = environment.step(state, answer).reward
    if not isinstance(reward, RewardJob):
        return reward
    if not reward.function or reward.form or reward.with_task:
        raise ValueError(f"the environment answers with {reward}: compare one whose reward is a plain function")
    found = resolve_name(reward.function)(**reward.arguments)
    if not isinstance(found, Mapping):
        return float(found)
    weights = dict.fromkeys(found, 1.0) if reward.weights is None else reward.weights
    return sum(weight * found[name] for name, weight in weights.items())


def grpo_config(settings: Settings, directory: Path, micro_batch: int | None = None) -> GRPOConfig:
    """Translate the configuration's batch, sampling, objective and optimizer into TRL's.

    ``micro_batch`` samples go through the model at a time; None: all of an optimizer step.
    Raises: ValueError when ``micro_batch`` does not divide the step.
    """
    batch, objective, learner = settings.batch, settings.objective, settings.learner
    step_samples = batch.groups_per_batch * batch.group_size // batch.mini_batches
    micro_batch = micro_batch or step_samples
    if step_samples % micro_batch:
        raise ValueError(
            f"micro_batch is {micro_batch}, an optimizer step has {step_samples} samples: use a divisor of them"
        )
    return GRPOConfig(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        gradient_checkpointing=False,
        seed=settings.run.seed,
        max_steps=settings.run.num_batches * batch.mini_batches,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=step_samples // micro_batch,
        steps_per_generation=batch.mini_batches * step_samples // micro_batch,
        num_iterations=1,
        num_generations=batch.group_size,
        shuffle_dataset=False,
        max_completion_length=settings.sampling.max_turn_tokens,
        temperature=settings.sampling.temperature,
        top_p=1.0,
        top_k=0,
        importance_sampling_level=objective.ratio_unit,
        loss_type="grpo",
        scale_rewards="group" if objective.normalise_by_std else "none",
        epsilon=objective.eps_low,
        epsilon_high=objective.eps_high,
        beta=0.0,
        router_aux_loss_coef=0.0,
        learning_rate=learner.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=learner.warmup_steps,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
    )


def train(
    settings: Settings, record: Record, scratch: Path, micro_batch: int | None = None, until: float | None = None
) -> None:
    """Make the whole run. Raises: ValueError for an environment of several turns or with slow rewards."""
    environment = create_environment(settings.environment.name, settings.environment.options)
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path)
    model = AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32)
    rows = task_rows(environment, "train", settings.run.num_batches * settings.batch.groups_per_batch)

    def reward(completions: Sequence[Any], state: Sequence[str], **_: Any) -> list[float]:
        answers = [completion[0]["content"] for completion in completions]
        return [reward_of(environment, json.loads(each), text) for each, text in zip(state, answers, strict=True)]

    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=grpo_config(settings, scratch, micro_batch),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Evaluation(settings, environment, tokenizer, record, until)],
    )
    trainer.record = record
    trainer.train()
    record.write("end")


def main() -> None:
    """Parse, train."""
    parser = argparse.ArgumentParser(prog="benchmarks.against_trl.trl_run", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, help="samples in one forward and backward pass (default: all of a step)")
    parser.add_argument("--until", type=float, help="end at this held-out reward (default: after all batches)")
    parser.add_argument("--record", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--scratch", type=Path, required=True, help="TRL's output directory")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = load_settings(arguments.config, arguments.overrides)
    train(settings, Record(arguments.record), arguments.scratch, arguments.micro_batch, arguments.until)


if __name__ == "__main__":
    main()
