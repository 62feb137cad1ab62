"""The workload: model, tasks and sizes, the same in every part of the comparison, and the cores of each part."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.pipeline.pinned import parse_cores
from gspo_services.shared.settings import Settings, load_settings
from tests.support.processes.ports import free_ports

ENVIRONMENT: Final = "benchmarks.pipeline.environment:Letters"
CONFIG: Final = """\
[environment]
name = "{environment}"
options = {{ shortest = {shortest}, longest = {longest} }}

[model]
path = "{model}"

[sampling]
temperature = 1.0
max_turn_tokens = {turn_tokens}
max_tokens = {max_tokens}

[batch]
group_size = {group_size}
groups_per_batch = {groups_per_batch}
mini_batches = {mini_batches}

[evaluation]
every_batches = 0

[rollout]
num_servers = 1
max_running = {max_running}
max_total_tokens = 65536

[learner]
learning_rate = 1e-6
max_tokens_per_micro_batch = 4096
"""
MARKERS: Final = 4
"""Tokens that the chat template adds around a prompt, plus one spare."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of a run.

    With short prompts, generating takes longer than training. ``prompt_letters`` evens that out: the learner reads them once
    per episode, SGLang once per group.
    """

    hidden_size: int = 256
    layers: int = 2
    prompt_letters: int = 32
    """On average; a prompt has up to a quarter more or fewer."""
    turn_tokens: int = 64
    group_size: int = 8
    groups_per_batch: int = 24
    mini_batches: int = 4
    max_running: int = 64
    """Episodes under way."""

    @property
    def shortest_prompt(self) -> int:
        return max(8, self.prompt_letters - self.prompt_letters // 4)

    @property
    def longest_prompt(self) -> int:
        return self.prompt_letters + self.prompt_letters // 4


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Cores of SGLang with its agent, and of the learner; the broker and the watching process use any core."""

    rollout: frozenset[int]
    learner: frozenset[int]

    @property
    def is_shared(self) -> bool:
        return bool(self.rollout & self.learner)


@dataclass(frozen=True)
class RunFiles:
    """One run's directory and start arguments."""

    config: Path
    settings: Settings
    overrides: list[str] = field(default_factory=list)


def choose_cores(rollout: str, learner: str) -> Cores:
    """Read the command line; empty texts divide the cores of this process into two halves.

    Raises: ValueError for cores that do not exist, or the same for both.
    """
    available = sorted(os.sched_getaffinity(0))
    half = max(1, len(available) // 2)
    cores = Cores(
        rollout=frozenset(parse_cores(rollout)) if rollout else frozenset(available[:half]),
        learner=frozenset(parse_cores(learner)) if learner else frozenset(available[half:] or available),
    )
    missing = (cores.rollout | cores.learner) - set(available)
    if missing:
        raise ValueError(f"cores {sorted(missing)} are not there: this process may use {available}")
    if cores.is_shared:
        raise ValueError(f"cores {sorted(cores.rollout & cores.learner)} are given to both halves: each needs its own")
    return cores


def write_config(path: Path, workload: Workload, model: Path) -> None:
    """Write the TOML that all runs share, and make its directory."""
    text = CONFIG.format(
        environment=ENVIRONMENT,
        model=model,
        turn_tokens=workload.turn_tokens,
        shortest=workload.shortest_prompt,
        longest=workload.longest_prompt,
        max_tokens=workload.turn_tokens + workload.longest_prompt + MARKERS,
        group_size=workload.group_size,
        groups_per_batch=workload.groups_per_batch,
        mini_batches=workload.mini_batches,
        max_running=workload.max_running,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_files(config: Path, directory: Path, *, num_batches: int, max_lag: int) -> RunFiles:
    """Return a run with its own directory and ports."""
    work, batch, weights = free_ports(3)
    overrides = [
        f"run.directory={directory}",
        f"run.num_batches={num_batches}",
        "evaluation.every_batches=0",
        f"batch.max_lag={max_lag}",
        f"broker.work_endpoint=tcp://127.0.0.1:{work}",
        f"broker.batch_endpoint=tcp://127.0.0.1:{batch}",
        f"learner.weights_endpoint=tcp://127.0.0.1:{weights}",
        "broker.metrics_port=0",
        "learner.metrics_port=0",
        "rollout.metrics_port=0",
    ]
    return RunFiles(config, load_settings(config, overrides), overrides)
