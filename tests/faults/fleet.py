"""The processes of a run, each started separately and with its own settings, as on several hosts."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.rollout.sglang.server_process import ServerOptions, load_files, server_command, server_environment
from tests.support.processes.ports import free_ports
from tests.support.processes.run_process import REPOSITORY

POLL_S: Final = 0.05
RESTART_S: Final = 3.0
CONFIG: Final = REPOSITORY / "examples/calculator.toml"
MODEL: Final = REPOSITORY / "models/tiny"


@dataclass
class Member:
    """One process; it is started again whenever it fails, unless ``keep`` is False."""

    name: str
    command: list[str]
    log: Path
    keep: bool = True
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    """Its exit statuses so far."""
    ended_at: float = 0.0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )

    def look(self) -> bool:
        """Whether it runs; notes its end."""
        if self.process is not None and self.process.poll() is not None:
            self.ends.append(self.process.returncode)
            self.process = None
            self.ended_at = time.monotonic()
        return self.process is not None

    @property
    def is_up(self) -> bool:
        """Whether it runs, or will not be started again."""
        return self.look() or not self.keep or self.ends[-1] == 0

    def keep_running(self) -> None:
        """Start it again a moment after it fails, as a process manager does; status 0 means that the run is over."""
        if not self.look() and self.keep and self.ends[-1] != 0 and time.monotonic() - self.ended_at > RESTART_S:
            self.start()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill_tree(self) -> None:
        """Send SIGKILL to it and to all that it has started; remove what an SGLang among them leaves in shared memory."""
        tree = [*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)]
        left = load_files(process.pid for process in tree)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for path in left:
            path.unlink(missing_ok=True)

    def scheduler(self) -> psutil.Process:
        """The SGLang scheduler that this rollout has started."""
        for process in psutil.Process(self.pid).children(recursive=True):
            if "scheduler" in process.name() or any("scheduler" in word for word in process.cmdline()):
                return process
        raise AssertionError(f"{self.name} has no scheduler")


class Fleet:
    """The processes of one run. Use as a context manager; leaving it kills everything that was started."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.directory = directory
        self.work_port, self.batch_port, self.weights_port, self.engine_port = free_ports(4)
        self._settings = [
            f"model.path={MODEL}",
            f"run.directory={directory}",
            "run.num_batches=100000",
            f"broker.work_endpoint=tcp://127.0.0.1:{self.work_port}",
            f"broker.batch_endpoint=tcp://127.0.0.1:{self.batch_port}",
            f"learner.weights_endpoint=tcp://127.0.0.1:{self.weights_port}",
            "broker.metrics_port=0",
            "learner.metrics_port=0",
            "rollout.metrics_port=0",
            "evaluation.every_batches=0",
            "batch.groups_per_batch=8",
            "batch.group_size=4",
            "rollout.max_running=16",
            "rollout.max_total_tokens=16384",
            "rollout.chunk_tokens=4",
            "broker.lease_s=5",
            *settings,
        ]
        self.members: dict[str, Member] = {}
        self._watch = threading.Event()

    def __enter__(self) -> Self:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        # What is killed leaves its temporary files. The path is short, because sockets are among them.
        self._temporary = Path(tempfile.mkdtemp(prefix="fleet-"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for member in self.members.values():
            if member.look():
                process = member.process
                member.kill_tree()
                assert process is not None
                process.wait(20)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def start(self, role: str, *settings: str, name: str = "", environment: Mapping[str, str] | None = None) -> Member:
        """Start a process with additional settings; rollouts get a name. ``environment``: variables of its own."""
        command = [sys.executable, "-m", f"gspo_services.{role}", str(CONFIG)]
        for setting in (*self._settings, *settings):
            command += ["--set", setting]
        if name:
            command += ["--name", name]
        name = name or role
        member = Member(
            name=name,
            command=command,
            log=self.directory / "logs" / f"{name}.log",
            environment={"TMPDIR": str(self._temporary), **(environment or {})},
        )
        member.start()
        self.members[name] = member
        return member

    def start_engine(self, name: str = "sglang", model: Path = MODEL) -> Member:
        """Start an SGLang server that no rollout owns, on ``engine_port``, with the weights that the run begins with."""
        log = self.directory / "logs" / f"{name}.log"
        options = ServerOptions(model_path=model, log_path=log, max_total_tokens=16384)
        member = Member(
            name=name,
            command=server_command(options, port=self.engine_port, cuda=False),
            log=log,
            environment=server_environment({}, cuda=False) | {"TMPDIR": str(self._temporary)},
        )
        member.start()
        self.members[name] = member
        return member

    def rows(self, event: str) -> list[dict[str, Any]]:
        """Rows of one event in the run's metrics.jsonl."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """A process's log lines of one event, over all of its lives."""
        path = self.directory / "logs" / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [row for row in found if row.get("event") == event]

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float = 400.0) -> None:
        """Wait, and start again what fails. Raises: AssertionError with the last lines of all logs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for member in self.members.values():
                member.keep_running()
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s:\n{self.tails()}"
            self._watch.wait(POLL_S)

    def wait_batches(self, number: int, timeout_s: float = 600.0) -> None:
        """Wait until metrics.jsonl has this many batches."""
        self.wait_until(f"{number} batches", lambda: len(self.rows("batch")) >= number, timeout_s)

    def finish(self, timeout_s: float = 900.0) -> None:
        """Tell the run to stop, then wait until every process has ended with status 0."""
        # One that failed a moment ago is started again first, so that it too ends with the run.
        self.wait_until("every process", lambda: all(member.is_up for member in self.members.values()))
        command = [sys.executable, "-m", "gspo_services.cli.main", "stop", str(self.directory)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr + self.tails()
        self.wait_until("end of the run", lambda: bool(self.events("learner", "run_complete")), timeout_s)
        for member in self.members.values():
            member.keep = False
        # Rollouts end by themselves; the other two serve until they are told to stop.
        own = [member for name, member in self.members.items() if name.startswith("rollout")]
        self.wait_until("end of the rollouts", lambda: not [member for member in own if member.look()], 90)
        for name in ("learner", "broker"):
            self.stop(name)
            own.append(self.members[name])
        assert [member.ends[-1] for member in own] == [0] * len(own), self.tails()

    def stop(self, name: str, timeout_s: float = 90.0) -> float:
        """Send SIGTERM; returns the seconds until the process was gone. It is not started again."""
        member, begin = self.members[name], time.monotonic()
        member.keep = False
        member.signal(signal.SIGTERM)
        self.wait_until(f"end of {name}", lambda: not member.look(), timeout_s)
        return time.monotonic() - begin

    def leased(self, name: str) -> set[int]:
        """The trajectories that a rollout has leased, by the ledger."""
        query = "SELECT trajectory_id FROM trajectories WHERE status = 'leased' AND holder_peer = ?"
        with closing(sqlite3.connect(f"file:{self.directory / LEDGER_FILE}?mode=ro", uri=True)) as connection:
            return {row[0] for row in connection.execute(query, (name,))}

    def num_leases(self, name: str) -> int:
        """How many leases the ledger shows for a rollout."""
        return len(self.leased(name))

    def finished(self) -> set[int]:
        """The trajectories that have ended, by the ledger."""
        with closing(sqlite3.connect(f"file:{self.directory / LEDGER_FILE}?mode=ro", uri=True)) as connection:
            return {row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories WHERE status = 'finished'")}

    def tails(self) -> str:
        """The last lines of every process's log."""
        parts = []
        for member in self.members.values():
            lines = member.log.read_text(errors="replace").splitlines()[-8:]
            parts.append(f"--- {member.name}, ended {member.ends}\n" + "\n".join(line[:400] for line in lines))
        return "\n".join(parts)
