"""The jobs of the worker processes; only they import torch, not the command that lists and estimates."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.study.config import RunConfig


def make_start(directory: Path, config: RunConfig) -> None:
    """Make the start model of a run."""
    from benchmarks.study.run import prepare_start

    prepare_start(directory, config)


def make_run(directory: Path, config: RunConfig) -> float:
    """Make one run; return its CPU seconds."""
    from benchmarks.study.run import execute

    began = time.process_time()
    execute(directory, config)
    return time.process_time() - began


def make_probes(directory: Path) -> None:
    """Make the probes of question b."""
    from benchmarks.study.volatility import execute_probes

    execute_probes(directory)
