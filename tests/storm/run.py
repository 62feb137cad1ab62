"""The run that the storm hits: ``gspo run`` with keys on small disks, as a user starts it, and servers of sandboxes."""

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

from gspo_services.shared.net import KEY_ROLES
from tests.storm.hostile import NAMES
from tests.storm.parts import BATCH_PORT, CONFIG, WEIGHTS_PORT, WORK_PORT, Part, blows
from tests.support.processes.run_process import REPOSITORY

GSPO: Final = (sys.executable, "-m", "gspo_services.cli.main")
CLASSIFIER: Final = "import pathlib, tests.support.rewards.classifiers as c; c.save_classifier(pathlib.Path({!r}))"
LOOK_S: Final = 0.5
STOP_S: Final = 300.0
HOSTILE_STOP_S: Final = 30.0


@dataclass(frozen=True)
class Trained:
    """A batch that was trained for the first time: when (Unix time), and how many trajectories it had."""

    time_s: float
    num_trajectories: int


class Server:
    """A server of sandboxes, which is started again whenever it ends, as a service manager does."""

    def __init__(self, port: int, log: Path) -> None:
        self._port, self._log = port, log
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start it if it does not run."""
        if self._process is None or self._process.poll() is not None:
            settings = (f"sandbox.port={self._port}", "sandbox.metrics_port=0", "sandbox.max_sandboxes=2")
            command = [*GSPO, "sandbox", *(word for setting in settings for word in ("--set", setting))]
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPOSITORY)

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            finally:
                self._process.kill()


class StormRun:
    """Use as a context manager; leaving it ends the run, its servers and its hostile peer."""

    def __init__(self, part: Part, place: Path, seed: int, *settings: str) -> None:
        """``place`` gets the models, the keys, the weights' folder and the run's directory, which may be a mounted disk."""
        self.place, self.directory, self.weights = place, place / "run", place / "weights"
        self._part, self._seed, self._more = part, seed, settings
        self._keys = place / "keys"
        self._settings = [
            f"run.directory={self.directory}",
            f"run.seed={seed}",
            "run.num_batches=1000000",
            "run.max_restarts=1000",
            f"model.path={place / 'model'}",
            f"security.keys={self._keys}",
            f"rollout.weights_directory={self.weights}",
            *part.settings,
            *settings,
        ]
        self._watch = threading.Event()
        self._servers = [Server(port, place / f"sandbox-{port}.log") for port in part.sandbox_ports]
        self._hostile: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.weights.mkdir(parents=True)
        if not any(setting.startswith("model.path=") for setting in self._more):
            subprocess.run([*GSPO, "model", "tiny", str(self.place / "model"), "--seed", str(self._seed)], check=True)
        if self._part.has_reward_model:
            program = CLASSIFIER.format(str(self.place / "classifier"))
            subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
        names = [word for name in (*KEY_ROLES, *NAMES) for word in ("--name", name)]
        subprocess.run([*GSPO, "keys", str(self._keys), *names], check=True, stdout=subprocess.DEVNULL)
        for server in self._servers:
            server.keep()
        flags = [word for setting in self._settings for word in ("--set", setting)]
        with (self.place / "run.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*GSPO, "run", str(CONFIG), "--plain", *flags], stdout=output, stderr=output, cwd=REPOSITORY
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.calm()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STOP_S)
        for server in self._servers:
            server.stop()

    def attack(self) -> None:
        """Start the hostile peer, and tell the attackers among the agents."""
        blows(self.place).touch()
        endpoints = [f"tcp://127.0.0.1:{port}" for port in (WORK_PORT, BATCH_PORT, WEIGHTS_PORT)]
        self._hostile = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.storm.hostile", *endpoints),
                *(str(self._keys), str(self._seed)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def calm(self) -> str:
        """End the attacks; returns what the hostile peer says that it did."""
        blows(self.place).unlink(missing_ok=True)
        if self._hostile is None:
            return ""
        hostile, self._hostile = self._hostile, None
        try:
            said, _ = hostile.communicate(timeout=HOSTILE_STOP_S)
        except subprocess.TimeoutExpired:
            hostile.kill()
            said, _ = hostile.communicate()
        return "attacks of a peer: " + counted(said.split("\n")[:-1])

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
            for server in self._servers:
                server.keep()
            look()
            self._watch.wait(min(LOOK_S, left))

    def wait_batches(self, number: int, timeout_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait for the first batches. Raises: AssertionError."""
        deadline = time.monotonic() + timeout_s
        while len(self.trained()) < number:
            assert time.monotonic() < deadline, f"fewer than {number} batches within {timeout_s} s:\n{self.tail()}"
            self.wait(LOOK_S, look)

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of one kind in metrics.jsonl; an incomplete last line is left out."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def logged(self, *events: str) -> list[dict[str, Any]]:
        """The broker's log lines of these events, in order."""
        found = []
        logs = (self.directory / "logs").glob("broker.log*")
        for path in sorted(logs, key=lambda path: path.stat().st_mtime):
            for line in path.read_text(errors="replace").split("\n"):
                if line.startswith("{") and line.endswith("}") and any(f'"{event}"' in line for event in events):
                    row = json.loads(line)
                    found += [row] if row.get("event") in events else []
        return found

    def trained(self) -> list[Trained]:
        """The batches so far."""
        return [Trained(row["time"], row["num_trajectories"]) for row in self.rows("batch") if not row["again"]]

    def tail(self) -> str:
        """The end of what ``gspo run`` printed."""
        return (self.place / "run.log").read_text(errors="replace")[-3000:]


def counted(names: list[str]) -> str:
    """Each with how often it occurs."""
    return ", ".join(f"{number} {name}" for name, number in sorted(Counter(names).items()))
