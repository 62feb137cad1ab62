"""What a rank does whose peer dies, or hangs, in the middle of training."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lost_rank_worker import STATUS
from tests.support.training_groups import write_model_and_groups

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lost")
    write_model_and_groups(directory)
    return directory


@contextlib.contextmanager
def two_ranks(work: Path, timeout_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that train, seen to have trained a batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.support.lost_rank_worker", str(work), str(timeout_s)]
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


def test_a_rank_whose_peer_is_killed_ends_at_once_and_says_why(work: Path) -> None:
    with two_ranks(work, 1800) as (first, second):
        second.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        output, _ = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == STATUS, output
        assert time.monotonic() - begin < PATIENCE_S
        assert "rank 0 lost another rank in a collective (" in output
        assert "it resumes from its last checkpoint" in output


def test_a_rank_whose_peer_hangs_ends_after_the_timeout(work: Path) -> None:
    with two_ranks(work, 3) as (first, second):
        second.send_signal(signal.SIGSTOP)
        output, _ = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == STATUS, output
        assert "rank 0 lost another rank in a collective (" in output
