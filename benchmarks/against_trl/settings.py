"""The compared tasks, and the settings that each system tries on top of a task's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from benchmarks.against_trl.curve import TARGET

TaskName = Literal["arithmetic", "counting", "sums"]


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """A setting of TRL."""

    threads: int
    micro_batch: int | None = None
    """Samples in one forward and backward pass; None: all of an optimizer step."""
    overrides: tuple[str, ...] = ()
    """Of the configuration."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A configuration, and the settings that are tried with it on the first seed."""

    config: Path
    num_batches: int
    ours: Mapping[str, list[str]]
    theirs: Mapping[str, Theirs]
    plot: Path
    target: float = TARGET
    until_target: bool = False
    """Runs end with the first evaluation at the target."""


OURS: Final[dict[str, list[str]]] = {
    "2 servers": [],
    "1 server": ["rollout.num_servers=1", "rollout.max_running=128"],
}
"""Settings of this project: the example unchanged, or one SGLang server for all samples next to the learner."""

THEIRS: Final[dict[str, Theirs]] = {"1 thread": Theirs(threads=1), "2 threads": Theirs(threads=2)}
"""Threads of TRL's process."""

CALIBRATED_WIDTH: Final = ("objective.eps_low=0.033", "objective.eps_high=0.034")
"""About what calibration finds at lag 2. TRL has no calibration, and with the paper's 3e-4 it learns sums hardly at all."""

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
        plot=Path("runs/against-trl-counting.png"),
    ),
    "sums": Task(
        config=Path("examples/smollm2.toml"),
        num_batches=40,
        ours={"1 server": []},
        theirs={"2 threads, eps 0.033": Theirs(threads=2, overrides=CALIBRATED_WIDTH)},
        plot=Path("docs/evidence/images/against-trl-sums.png"),
        target=0.7,
        until_target=True,
    ),
}
"""Arithmetic has answers of three tokens and a quarter of a million parameters: most of the cost lies outside the model.
Counting has long-tailed answers and 4 million parameters: most of the cost lies in the model.
Sums is SmolLM2-135M, a real model, on tasks of reasoning-gym."""

TIMEOUT_S: Final = 3600.0
"""Time limit of one run."""


def say(text: str) -> None:
    """Print progress."""
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)
