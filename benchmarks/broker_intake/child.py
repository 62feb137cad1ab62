"""A process of the benchmark that answers requests: one JSON line in, one JSON line out."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil


class Child:
    """A ``python -m MODULE ARGUMENTS`` that answers each line with one line; use it as a context manager."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def tell(self, **request: Any) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last request. Raises: RuntimeError when the process ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._process.args} ended with status {self._process.wait(timeout=60)}: see its output above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        self.tell(**request)
        return self.answer()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, all its threads together."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve in the child: answer each line of stdin until it is closed."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
