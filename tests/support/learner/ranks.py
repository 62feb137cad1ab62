"""The ranks of a module as processes on this machine, each with its own log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes.ports import free_port

TAIL_BYTES = 4000


class Ranks:
    """``python -m MODULE *ARGUMENTS`` as several ranks, or alone as no rank. No process outlives the block."""

    def __init__(
        self, module: str, arguments: Sequence[str], num_ranks: int, logs: Path, *, accelerator: str = "cpu"
    ) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._logs = [logs.with_name(f"{logs.name}-{rank}-of-{num_ranks}.log") for rank in range(num_ranks)]
        self._accelerator = accelerator
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        num_ranks = len(self._logs)
        common = {"DS_ACCELERATOR": self._accelerator, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if num_ranks > 1:
            common |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, log in enumerate(self._logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            with log.open("wb") as output:
                self._processes.append(
                    subprocess.Popen(self._command, env=os.environ | common | place, stdout=output, stderr=output)
                )
        return self

    def finish(self, timeout_s: float) -> None:
        """Wait until all have succeeded. Raises: AssertionError with the end of each log; subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout_s
        for process in self._processes:
            process.wait(max(0.0, end - time.monotonic()))
        statuses = [process.returncode for process in self._processes]
        assert not any(statuses), "\n".join([str(statuses), *(_tail(log) for log in self._logs)])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    return f"{log}:\n" + log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
