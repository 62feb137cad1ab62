"""A tiny mixture-of-experts model that can do its tasks but has a bad policy: the start of every demonstration.

A byte-level tokenizer with single-token chat markers, and a Qwen3-MoE of a quarter of a million parameters. It learns by
imitation from the environments' own demonstrations: first from a careful teacher, then from a careless one that is right
about a third of the time. The result has the skill and a bad policy. Its sampled reward on held-out problems starts
near 0.3, its greedy reward even lower, and everything above that is the work of reinforcement learning.

A model for agents learns from conversations with tools instead, and its chat template knows tools. A model for programs
learns from small programs, and its folder holds tasks of the environment ``code``.

The seed determines everything. It takes one minute on one core.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from gspo.tasks.environments import DemonstratingEnvironment
from gspo_services.prepare.tiny_models.imitation import TinyProgress, imitate
from gspo_services.prepare.tiny_models.schools import EnvironmentSchool, ProgramSchool, School, ToolSchool
from gspo_services.prepare.tiny_models.small_programs import PROGRAM_PIECES, write_small_problems
from gspo_services.prepare.tiny_models.tokenizer import UNUSED_IDS, build_tokenizer
from gspo_services.tasks.environments import Shop, ShopOptions, create_environment

DEFAULT_ENVIRONMENTS = ("arithmetic", "calculator")
TOOLS_TASK_SET = "shop"
PROGRAMS = "programs"
DEFAULT_NUM_STEPS = 600
RECORD_FILE = "tiny_model.json"


@dataclass(frozen=True)
class TinyReport:
    """Facts about the new model. Rewards are means over held-out problems, by environment."""

    directory: Path
    num_parameters: int
    num_steps: int
    """Optimizer steps of the imitation."""
    seconds: float
    """From the beginning to the measured rewards."""
    sampled_rewards: Mapping[str, float]
    """At temperature 1: where a training run starts."""
    greedy_rewards: Mapping[str, float]


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    environments: Sequence[str] = DEFAULT_ENVIRONMENTS,
    tools: bool = False,
    programs: bool = False,
    for_gpu: bool = False,
    num_steps: int = DEFAULT_NUM_STEPS,
    num_eval_episodes: int = 256,
    progress: Callable[[TinyProgress], None],
) -> TinyReport:
    """Make a tiny model and its tokenizer in ``directory``, as an ordinary Hugging Face checkpoint in float32.

    It learns from ``environments``; with ``tools`` from the shop's conversations, for agents; with ``programs`` from small
    programs, whose problems are written to ``tasks`` below ``directory``.
    ``for_gpu``: with heads of a size that SGLang's kernels for CUDA have.
    ``directory`` appears complete or not at all; an earlier tiny model there is replaced.
    Raises: ValueError when it holds anything else, or an environment has no demonstrations.
    """
    refuse_foreign_directory(directory)
    started = time.monotonic()
    tokenizer = build_tokenizer(tools=tools, pieces=PROGRAM_PIECES if programs else ())
    schools: Mapping[str, School]
    if tools:
        schools = {TOOLS_TASK_SET: ToolSchool(tokenizer, Shop(ShopOptions()))}
    elif programs:
        schools = {PROGRAMS: ProgramSchool(tokenizer)}
    else:
        schools = {name: EnvironmentSchool(tokenizer, _demonstrating(name)) for name in environments}
    if not schools:
        raise ValueError("no environment to learn from: name at least one")
    with _one_deterministic_thread(seed):
        model = build_model(tokenizer, head_size=64 if for_gpu else 16)
        imitate(model, list(schools.values()), random.Random(seed), num_steps, progress)
        sampled = {name: school.reward(model, num_eval_episodes, greedy=False) for name, school in schools.items()}
        greedy = {name: school.reward(model, num_eval_episodes, greedy=True) for name, school in schools.items()}
    report = TinyReport(
        directory=directory,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_steps=num_steps,
        seconds=time.monotonic() - started,
        sampled_rewards=sampled,
        greedy_rewards=greedy,
    )
    _save(model, tokenizer, report, seed, programs=programs)
    return report


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    num_experts_per_token: int = 2,
    expert_size: int = 64,
    head_size: int = 16,
) -> Qwen3MoeForCausalLM:
    """An untrained Qwen3-MoE in float32 on the CPU, with 64 hidden units; torch's random state determines its weights.

    ``expert_size``: an expert's inner width. ``head_size``: of each of 4 attention heads; SGLang's kernels for CUDA take 64.
    """
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer) + UNUSED_IDS,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_size,
        intermediate_size=128,
        moe_intermediate_size=expert_size,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        use_sliding_window=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    config.dtype = torch.float32
    return Qwen3MoeForCausalLM(config)


def refuse_foreign_directory(directory: Path) -> None:
    """Raises: ValueError when ``directory`` holds something other than a tiny model, which must not be overwritten."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file: name a directory")
    if any(directory.iterdir()) and not (directory / RECORD_FILE).is_file():
        raise ValueError(f"{directory} is not empty and not a tiny model: name another directory, or empty it first")


def _demonstrating(name: str) -> DemonstratingEnvironment:
    environment = create_environment(name, {})
    if not isinstance(environment, DemonstratingEnvironment):
        raise ValueError(f'environment "{name}" has no demonstrations, so a tiny model cannot learn from it')
    return environment


@contextmanager
def _one_deterministic_thread(seed: int) -> Iterator[None]:
    """Inside the block torch is deterministic: one thread adds in one order on any machine."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _save(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, report: TinyReport, seed: int, *, programs: bool
) -> None:
    """Write everything beside the directory, then rename it into place."""
    directory = report.directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}.unfinished"
    previous = directory.parent / f".{directory.name}.{os.getpid()}.previous"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        logging.disable_progress_bar()
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if programs:
            write_small_problems(unfinished / "tasks")
        record = {
            "seed": seed,
            "num_steps": report.num_steps,
            "sampled_rewards": dict(report.sampled_rewards),
            "greedy_rewards": dict(report.greedy_rewards),
        }
        (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        refuse_foreign_directory(directory)
        if directory.exists():
            directory.rename(previous)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)
