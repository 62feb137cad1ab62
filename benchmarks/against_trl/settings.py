"""The compared tasks, and the settings that each system tries on top of a task's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

TaskName = Literal["arithmetic", "counting"]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """A setting of TRL."""

    threads: int
    micro_batch: int | None = None
    """Samples in one forward and backward pass; None: all of an optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A configuration, and the settings that are tried with it on the first seed."""

    config: Path
    num_batches: int
    ours: Mapping[str, list[str]]
    theirs: Mapping[str, Theirs]
    plot: Path


OURS: Final[dict[str, list[str]]] = {
    "2 servers": [],
    "1 server": ["rollout.num_servers=1", "rollout.max_running=128"],
}
"""Settings of this project: the example unchanged, or one SGLang server for all samples next to the learner."""

THEIRS: Final[dict[str, Theirs]] = {"1 thread": Theirs(threads=1), "2 threads": Theirs(threads=2)}
"""Threads of TRL's process."""

TASKS: Final[dict[TaskName, Task]] = {
    "arithmetic": Task(
        config=Path("examples/arithmetic.toml"),
        num_batches=30,
        ours=OURS,
        theirs=THEIRS,
        plot=Path("runs/against-trl.png"),
    ),
    "counting": Task(
        config=Path(__file__).with_name("counting.toml"),
        num_batches=20,
        ours={"1 server": [], "2 servers": ["rollout.num_servers=2", "rollout.max_running=64"]},
        theirs={
            "2 threads": Theirs(threads=2),
            "2 threads, micro-batches of 16": Theirs(threads=2, micro_batch=16),
        },
        plot=Path("docs/evidence/images/against-trl-counting.png"),
    ),
}
"""Arithmetic has answers of three tokens and a quarter of a million parameters: most of the cost lies outside the model.
Counting has long-tailed answers and 4 million parameters: most of the cost lies in the model."""

TIMEOUT_S: Final = 1800.0
"""Time limit of one run."""


def say(text: str) -> None:
    """Print progress."""
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
