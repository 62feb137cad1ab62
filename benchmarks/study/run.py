"""One run: sample, train, measure, batch after batch, in one deterministic thread; and its record on disk."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.study.config import RunConfig
from benchmarks.study.learner import DivergedError, Learner
from benchmarks.study.run_record import processor, record_path, weights_digest
from benchmarks.study.sampler import MAX_NEW_TOKENS, Episode, Part, Sampler
from benchmarks.study.start_model import load_start_model, study_environment
from benchmarks.study.tasks.credit import NumberGrades
from gspo.tasks.environments import Task
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

TASKS_PER_SEED = 1_000_000


def execute(directory: Path, config: RunConfig, *, start_steps: int | None = None) -> bool:
    """Make the run unless its record exists; return False if it does. The record appears complete or not at all."""
    path = record_path(directory, config)
    if path.is_file():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    model = _start_of(directory, config, start_steps)
    start = weights_digest(model.state_dict())
    with unfinished.open("w") as file:
        file.write(json.dumps({"run": config.run_id, "config": config.as_dict()}) + "\n")
        for record in batches(directory, config, model=model):
            file.write(json.dumps(record) + "\n")
            file.flush()
        ended = {"start": start, "end": weights_digest(model.state_dict()), "on": processor()}
        file.write(json.dumps(ended) + "\n")
    unfinished.rename(path)
    return True


def prepare_start(directory: Path, config: RunConfig) -> str:
    """Make the start model of a run unless it exists; return the digest of its weights."""
    return weights_digest(_start_of(directory, config).state_dict())


def batches(
    directory: Path,
    config: RunConfig,
    *,
    start_steps: int | None = None,
    model: Any = None,
    make_learner: Callable[[Any, RunConfig], Learner] = Learner,
) -> Iterator[dict[str, float]]:
    """Make the run; yield one record per batch, and one for the evaluation after the last.

    ``model``: what to start from; None: the start model of the run's task.
    """
    if model is None:
        model = _start_of(directory, config, start_steps)
    _one_deterministic_thread()
    tokenizer, environment = build_tokenizer(), study_environment(config.task)
    limit = MAX_NEW_TOKENS[config.task]
    sampler = Sampler(
        model.config, tokenizer, environment, max_new_tokens=limit, noise=config.noise, noise_sigma=config.noise_sigma
    )
    examiner = Sampler(model.config, tokenizer, environment, max_new_tokens=limit)
    learner = make_learner(model, config)
    source, held_out = environment.tasks("train"), environment.tasks("eval")
    versions: dict[int, dict[str, Tensor]] = {}
    num_tokens = 0
    for batch in range(config.num_batches + 1):
        versions[batch] = learner.weights()
        versions.pop(batch - config.lag - 1, None)
        record: dict[str, float] = {"batch": batch}
        if batch % config.eval_every == 0 or batch == config.num_batches:
            began = time.process_time()
            exam = [held_out.task(index) for index in range(config.num_eval_episodes)]
            (taken,) = examiner.play([Part(versions[batch], exam, _stream(config.seed, batch, "eval"))])
            record["eval"] = _mean_reward(taken)
            record["cpu_eval_s"] = time.process_time() - began
        if batch == config.num_batches:
            yield record
            return
        began = time.process_time()
        first = TASKS_PER_SEED * config.seed + batch * config.num_groups
        tasks = [source.task(first + index) for index in range(config.num_groups)]
        played = _sample(sampler, tasks, config, batch, versions)
        record["cpu_sample_s"] = time.process_time() - began
        episodes = [episode for episode, _ in played]
        num_tokens += sum(len(episode.answer.ids) for episode in episodes)
        record |= {"reward": _mean_reward(episodes), "tokens": num_tokens}
        try:
            record |= learner.train(
                [episode.train_sequence(version) for episode, version in played],
                [episode.reward for episode in episodes],
                version=batch,
                diagnose=batch % config.eval_every == 0,
                grades=_grades(tokenizer, tasks, episodes) if config.credit == "number" else None,
            )
        except DivergedError:
            # A result like any other: collapse is one of the questions.
            yield record | {"diverged": 1.0}
            return
        yield record


def _start_of(directory: Path, config: RunConfig, num_steps: int | None = None) -> Any:
    _one_deterministic_thread()
    return load_start_model(directory / "start", config.task, config.start_number, model=config.model, num_steps=num_steps)


def _one_deterministic_thread() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads what it has not written, and filling each new tensor takes a tenth of the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _sample(
    sampler: Sampler,
    tasks: Sequence[Task],
    config: RunConfig,
    batch: int,
    versions: Mapping[int, dict[str, Tensor]],
) -> list[tuple[Episode, int]]:
    """Sample whole groups in the order of their tasks, each under one version, and return that version too."""
    rng = random.Random(_stream(config.seed, batch, "lag"))
    lags = [rng.randint(0, config.lag) if config.lag_kind == "uniform" else config.lag for _ in tasks]
    made_by = [max(0, batch - lag) for lag in lags]
    indices = {made: [index for index, each in enumerate(made_by) if each == made] for made in sorted(set(made_by))}
    parts = [
        Part(
            versions[made],
            [tasks[index] for index in chosen for _ in range(config.group_size)],
            _stream(config.seed, batch, f"sample-{made}"),
            _stream(config.seed, made, "noise"),
        )
        for made, chosen in indices.items()
    ]
    groups: dict[int, list[tuple[Episode, int]]] = {}
    for (made, chosen), episodes in zip(indices.items(), sampler.play(parts), strict=True):
        for place, index in enumerate(chosen):
            group = episodes[place * config.group_size : (place + 1) * config.group_size]
            groups[index] = [(episode, made) for episode in group]
    return [member for index in range(len(tasks)) for member in groups[index]]


def _grades(tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task], episodes: Sequence[Episode]) -> list[NumberGrades]:
    """Grade the numbers of each episode; every task has a whole group of them."""
    group_size = len(episodes) // len(tasks)
    return [
        NumberGrades(tokenizer, str(tasks[index // group_size]["problem"]), episode.answer.ids)
        for index, episode in enumerate(episodes)
    ]


def _mean_reward(episodes: Sequence[Episode]) -> float:
    return sum(episode.reward for episode in episodes) / len(episodes)


def _stream(seed: int, batch: int, purpose: str) -> int:
    """Return the seed of one random stream."""
    return random.Random(f"{seed}:{batch}:{purpose}").getrandbits(62)
