"""Two ranks of ``tests.support.learner.lost_rank_worker`` as processes that a test can kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes.ports import free_port

PATIENCE_S = 120.0


@contextlib.contextmanager
def two_ranks(work: Path, timeout_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that are training and have trained a batch."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.support.learner.lost_rank_worker", str(work), str(timeout_s)]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in ("0", "1"):
            environment = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
        for process in ranks:
            assert process.stdout is not None
            assert any(line == "trained\n" for line in process.stdout)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
