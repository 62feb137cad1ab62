"""Question b: how many chosen experts change with one update, and the effect on the two kinds of ratio.

Starting from a model that has trained a little (so that the optimizer's moments are warm), the same updates are made at
many learning rates, each time from the same state and on the same answers. After 1 and 4 updates the log-probs of those
answers are compared with those of the weights that sampled them: with the routers' present choice, and with the experts
replayed that were chosen then. The part of a ratio's deviation that replay removes is due to changed experts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.config import RunConfig
from benchmarks.study.learner import Learner
from benchmarks.study.questions.grid import LONG, SEEDS
from benchmarks.study.run import TASKS_PER_SEED
from benchmarks.study.sampler import MAX_NEW_TOKENS, Episode, Part, Sampler
from benchmarks.study.start_model import load_start_model, study_environment
from gspo.inputs.units import segment_mean
from gspo.model.packing import PackedBatch, pack
from gspo.moe.experts import ExpertPicks, changed_share
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

LEARNING_RATES = (1e-6, 1e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
WARM_BATCHES = 4
UPDATES = (1, 4)
GRPO_CLIP_RANGE = (0.2, 0.27)
PROBE_FILE = "volatility-{seed}.jsonl"


def execute_probes(directory: Path, *, seeds: Sequence[int] = SEEDS) -> None:
    """Make the probes of each seed without a record; a record appears complete or not at all."""
    for seed in seeds:
        path = directory / "probes" / PROBE_FILE.format(seed=seed)
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        lines = [json.dumps(record) + "\n" for record in probe(directory, replace(LONG, seed=seed))]
        unfinished.write_text("".join(lines))
        unfinished.rename(path)


def probe(
    directory: Path,
    config: RunConfig,
    *,
    learning_rates: Sequence[float] = LEARNING_RATES,
    start_steps: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one record per learning rate, number of updates and precision of the reference; 0 updates: precision alone."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    start = partial(
        load_start_model,
        directory / "start",
        config.task,
        config.start_number,
        model=config.model,
        num_steps=start_steps,
    )
    model = start()
    environment, tokenizer = study_environment(config.task), build_tokenizer()
    sampler = Sampler(model.config, tokenizer, environment, max_new_tokens=MAX_NEW_TOKENS[config.task])
    source = environment.tasks("train")

    def play(weights: dict[str, Tensor], batch: int) -> list[Episode]:
        first = TASKS_PER_SEED * config.seed + batch * config.num_groups
        tasks = [source.task(first + index) for index in range(config.num_groups)]
        repeated = [task for task in tasks for _ in range(config.group_size)]
        (episodes,) = sampler.play([Part(weights, repeated, 1_000 * config.seed + batch)])
        return episodes

    learner = Learner(model, config)
    for batch in range(WARM_BATCHES):
        episodes = play(learner.weights(), batch)
        _train(learner, episodes, batch)
    warm = learner.state()
    episodes = play(learner.weights(), WARM_BATCHES)
    packed = pack([_plain(episode) for episode in episodes], policy_version=0)
    references = {"float32": _measure(learner, packed), "bf16": _bf16_reference(start, warm, packed)}
    here = {"task": config.task, "seed": config.seed}
    for name, reference in references.items():
        yield {**here, "learning_rate": 0.0, "updates": 0, "reference": name, **_compare(learner, packed, reference)}

    quarter = config.num_sequences // config.num_mini_batches
    for learning_rate in learning_rates:
        step = replace(config, learning_rate=learning_rate, num_mini_batches=1, num_sequences=quarter)
        learner = Learner(start(), step)
        learner.load_state(warm)
        for update in range(1, max(UPDATES) + 1):
            _train(learner, episodes[(update - 1) * quarter : update * quarter], 0)
            if update in UPDATES:
                for name, reference in references.items():
                    measured = _compare(learner, packed, reference)
                    yield {**here, "learning_rate": learning_rate, "updates": update, "reference": name, **measured}


def _plain(episode: Episode) -> Any:
    sequence = episode.train_sequence(0)
    return sequence.with_advantages(torch.zeros(sequence.num_tokens).numpy())


def _train(learner: Learner, episodes: Sequence[Episode], version: int) -> None:
    sequences = [episode.train_sequence(version) for episode in episodes]
    learner.train(sequences, [episode.reward for episode in episodes], version=version, diagnose=False)


@torch.no_grad()
def _measure(learner: Learner, packed: PackedBatch, picks: ExpertPicks | None = None) -> tuple[Tensor, ExpertPicks]:
    result = learner.logprobs(packed, picks)
    assert result.experts is not None
    return result.logprobs_T, result.experts


def _bf16_reference(start: Callable[[], Any], state: dict[str, Any], packed: PackedBatch) -> tuple[Tensor, ExpertPicks]:
    """Return what an engine in bf16 reports: the same weights, rounded to and computed in bf16."""
    model = start()
    learner = Learner(model, replace(LONG, seed=0))
    learner.load_weights(state["weights"])
    model.to(torch.bfloat16)
    return _measure(learner, packed)


def _compare(learner: Learner, packed: PackedBatch, reference: tuple[Tensor, ExpertPicks]) -> dict[str, float]:
    start_T, picks = reference
    mask_T = packed.mask_T
    record = {}
    for name, replayed in (("free", None), ("replayed", picks)):
        logprobs_T, chosen = _measure(learner, packed, replayed)
        if replayed is None:
            record["changed"] = changed_share(chosen, picks, mask_T)
        delta_T = logprobs_T - start_T
        delta_S = segment_mean(delta_T, mask_T, packed.sequence_ids_T, packed.num_sequences)
        tokens = delta_T[mask_T].double()
        ratio = tokens.exp()
        record[f"token_std_{name}"] = float(tokens.std())
        record[f"token_abs_{name}"] = float(tokens.abs().mean())
        record[f"sequence_std_{name}"] = float(delta_S.double().std())
        record[f"sequence_abs_{name}"] = float(delta_S.double().abs().mean())
        record[f"outside_grpo_{name}"] = float(
            ((ratio < 1 - GRPO_CLIP_RANGE[0]) | (ratio > 1 + GRPO_CLIP_RANGE[1])).double().mean()
        )
    return record
