"""The run that the storm hits: ``gspo run`` with keys on a small disk, as a user starts it."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil

from gspo_services.shared.net import KEY_ROLES
from tests.storm.hostile import NAMES
from tests.support.processes.ports import free_ports
from tests.support.processes.run_process import REPOSITORY

GSPO: Final = (sys.executable, "-m", "gspo_services.cli.main")
LOOK_S: Final = 0.5
STOP_S: Final = 300.0
HOSTILE_STOP_S: Final = 30.0
CONFIG: Final = REPOSITORY / "examples/arithmetic.toml"


@dataclass(frozen=True)
class Trained:
    """A batch that was trained for the first time: when (Unix time), and how many trajectories it had."""

    time_s: float
    num_trajectories: int


class StormRun:
    """Use as a context manager; leaving it ends the run and its hostile peer."""

    def __init__(self, place: Path, seed: int, *settings: str) -> None:
        """``place`` gets the model, the keys, the weights' folder and the run's directory, which may be a mounted disk."""
        self.place, self.directory, self.weights = place, place / "run", place / "weights"
        work, batch, weights = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
        self._endpoints = (work, batch, weights)
        self._seed = seed
        self._keys = place / "keys"
        self._settings = [
            f"run.directory={self.directory}",
            f"run.seed={seed}",
            "run.num_batches=1000000",
            "run.max_restarts=1000",
            f"model.path={place / 'model'}",
            f"security.keys={self._keys}",
            f"broker.work_endpoint={work}",
            f"broker.batch_endpoint={batch}",
            f"learner.weights_endpoint={weights}",
            "broker.metrics_port=0",
            "learner.metrics_port=0",
            "rollout.metrics_port=0",
            f"rollout.weights_directory={self.weights}",
            "learner.learning_rate=3e-5",
            "learner.keep_checkpoints=4",
            "evaluation.every_batches=25",
            *settings,
        ]
        self._watch = threading.Event()
        self._hostile: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.weights.mkdir(parents=True)
        subprocess.run([*GSPO, "model", "tiny", str(self.place / "model"), "--seed", str(self._seed)], check=True)
        names = [word for name in (*KEY_ROLES, *NAMES) for word in ("--name", name)]
        subprocess.run([*GSPO, "keys", str(self._keys), *names], check=True, stdout=subprocess.DEVNULL)
        flags = [word for setting in self._settings for word in ("--set", setting)]
        with (self.place / "run.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*GSPO, "run", str(CONFIG), "--plain", *flags], stdout=output, stderr=output, cwd=REPOSITORY
            )
        self.root = psutil.Process(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.calm()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_S)

    def attack(self) -> None:
        """Start the hostile peer."""
        self._hostile = subprocess.Popen(
            [sys.executable, "-m", "tests.storm.hostile", *self._endpoints, str(self._keys), str(self._seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def calm(self) -> str:
        """End the hostile peer; returns what it says that it did."""
        if self._hostile is None:
            return ""
        hostile, self._hostile = self._hostile, None
        try:
            said, _ = hostile.communicate(timeout=HOSTILE_STOP_S)
        except subprocess.TimeoutExpired:
            hostile.kill()
            said, _ = hostile.communicate()
        attacks = Counter(said.split("\n")[:-1])
        return "attacks: " + ", ".join(f"{number} {name}" for name, number in sorted(attacks.items()))

    def stop(self) -> int:
        """Stop the run as a user does; returns its exit status."""
        subprocess.run([*GSPO, "stop", str(self.directory)], check=True, cwd=REPOSITORY, timeout=120)
        return self._process.wait(STOP_S)

    def _require_both(self) -> None:
        assert self._process.poll() is None, f"the run ended with status {self._process.returncode}:\n{self.tail()}"
        hostile = self._hostile
        assert hostile is None or hostile.poll() is None, f"the hostile peer ended with status {hostile.returncode}"

    def wait(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Let time pass. Raises: AssertionError when the run or its hostile peer ends meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._require_both()
            look()
            self._watch.wait(min(LOOK_S, left))

    def wait_batches(self, number: int, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait for the first batches. Raises: AssertionError."""
        deadline = time.monotonic() + timeout_s
        while len(self.trained()) < number:
            assert time.monotonic() < deadline, f"fewer than {number} batches within {timeout_s} s:\n{self.tail()}"
            self.wait(LOOK_S, look)

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of one kind; an incomplete last line is left out."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def trained(self) -> list[Trained]:
        """The batches so far."""
        return [Trained(row["time"], row["num_trajectories"]) for row in self.rows("batch") if not row["again"]]

    def tail(self) -> str:
        """The end of what ``gspo run`` printed."""
        return (self.place / "run.log").read_text(errors="replace")[-3000:]
