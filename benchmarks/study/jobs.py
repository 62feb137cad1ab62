"""What the worker processes are given to do; torch is imported there, not in the command that lists and estimates."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.study.config import RunConfig, TaskName


def make_start(directory: Path, task: TaskName, seed: int) -> None:
    """The start model of a task and seed."""
    from benchmarks.study.run import prepare_start

    prepare_start(directory, task, seed)


def make_run(directory: Path, config: RunConfig) -> float:
    """One run; the CPU seconds it took."""
    from benchmarks.study.run import execute

    began = time.process_time()
    execute(directory, config)
    return time.process_time() - began


def make_probes(directory: Path) -> None:
    """The probes of question b."""
    from benchmarks.study.volatility import execute_probes

    execute_probes(directory)
