"""A real ``gspo run`` as a child process, on free ports. Tests start it, watch what it writes, kill parts, and stop it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes.ports import free_pair, free_ports

POLL_S = 0.2
REPOSITORY = Path(__file__).parents[3]


def gspo(*words: str) -> str:
    """What a command of ``gspo`` says that succeeds."""
    command = [sys.executable, "-m", "gspo_services.cli.main", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class RunProcess:
    """Use as a context manager; leaving it ends the run and everything that it started."""

    def __init__(self, config: Path, directory: Path, *overrides: str, folder: Path = REPOSITORY) -> None:
        """``folder``: where the command is given."""
        self.directory = directory
        self._folder = folder
        self._watch = threading.Event()
        work, batch, weights, broker, learner = free_ports(5)
        rollout = free_pair()
        self.metrics_ports = {"broker": broker, "learner": learner, "rollout-0": rollout}
        settings = [
            f"run.directory={directory}",
            f"broker.work_endpoint=tcp://127.0.0.1:{work}",
            f"broker.batch_endpoint=tcp://127.0.0.1:{batch}",
            f"learner.weights_endpoint=tcp://127.0.0.1:{weights}",
            f"broker.metrics_port={broker}",
            f"learner.metrics_port={learner}",
            f"rollout.metrics_port={rollout}",
            *overrides,
        ]
        self._command = [sys.executable, "-m", "gspo_services.cli.main", "run", str(config), "--plain"]
        for setting in settings:
            self._command += ["--set", setting]
        self.output = directory / "run.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RunProcess":
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, cwd=self._folder, env={**os.environ, "COLUMNS": "200"}
            )
        self._tree: set[psutil.Process] = set()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self._remember()
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for process in self._tree:
            if process.is_running():
                process.kill()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of one kind; a line that is being written is left out."""
        path = self.directory / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def events(self, process: str, event: str) -> list[dict[str, Any]]:
        """Log events of one process."""
        path = self.directory / "logs" / f"{process}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [row for row in found if row.get("event") == event]

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for something that the run writes. Raises: AssertionError with the end of its output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self._remember()
            assert self.process.poll() is None, f"the run ended while waiting for {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.tail()}"
            self._watch.wait(POLL_S)

    def wait_finished(self, timeout_s: float) -> int:
        """The exit status of the run."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self._remember()
            assert time.monotonic() < deadline, f"the run did not end within {timeout_s} s:\n{self.tail()}"
            self._watch.wait(POLL_S)
        return int(self.process.returncode)

    def pid_of(self, module: str, name: str = "") -> int:
        """The process that runs ``python -m module``, and has ``name`` among its arguments."""
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if module in words and (not name or name in words):
                return child.pid
        raise AssertionError(f"no process {module} {name}:\n{self.tail()}")

    def kill(self, module: str, name: str = "") -> int:
        """SIGKILL; returns the pid that was."""
        pid = self.pid_of(module, name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_each(self, every_batches: int = 1, timeout_s: float = 600) -> None:
        """SIGKILL to a rollout, the learner and a broker, each after so many batches more."""
        for number, process in enumerate(("rollout", "learner", "broker"), 1):
            least = every_batches * number
            self.wait_until(f"batch {least}", lambda least=least: len(self.rows("batch")) >= least, timeout_s)  # type: ignore[misc]
            self.kill(f"gspo_services.{process}")

    def leftovers(self) -> list[psutil.Process]:
        """Processes that the run started and that still exist."""
        return [process for process in self._tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def tail(self) -> str:
        """The end of the run's output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-25:])

    def _remember(self) -> None:
        try:
            self._tree.update(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return
