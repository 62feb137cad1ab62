"""The jobs of the worker processes; only they import torch, not the command that lists and estimates."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.study.config import RunConfig

ARITHMETIC = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
}
"""Variables of the environment with which one release of torch computes the same bits in each process of one kind of
processor, where they are set before torch is loaded. Without them torch and MKL choose their kernels, and even the numbers
that they draw, by the processor. MKL's roots, exponentials and logarithms heed none of them: a run on an Intel Xeon drew the
answers and had the first gradient of its twin on an AMD EPYC, but other last bits from the first step of Adam on."""


def make_start(directory: Path, config: RunConfig) -> str:
    """Make the start model of a run; return the digest of its weights."""
    from benchmarks.study.run import prepare_start

    return prepare_start(directory, config)


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
