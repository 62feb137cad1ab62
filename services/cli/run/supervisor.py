"""Supervises the processes of a run on this machine: starts, logs, restarts and stops them."""

import asyncio
import json
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import BinaryIO, Final

import structlog

from gspo_services.shared.placement import ProcessPlace
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_FAILED,
    EXIT_NO_ROOM,
    EXIT_OCCUPIED,
    EXIT_REPLACED,
    EXIT_UNPROVEN,
    ServiceError,
)
from gspo_services.shared.runtime.lifecycle import die_with_parent, module_command, until_stopped
from gspo_services.shared.runtime.log_files import USUAL_LIMITS, LogFile, LogLimits, read_end

log = structlog.get_logger()

MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 300.0
BACKOFF_S: Final = 1.0
OVER_WAIT_S: Final = 5.0
ROOM_WAITS: Final = 10
"""A process that ended because a disk is full is restarted after this many times ``backoff_s``, or once ROOM_BYTES more
are free in the run's directory."""
ROOM_BYTES: Final = 64 * 2**20
TAIL_LINES: Final = 15
TAIL_BYTES: Final = 131_072
"""More than the longest line: see services/shared/runtime/logs.py::MOST_CHARACTERS."""
FINAL_EVENTS: Final = ("cannot_start", "stopped_by_error", "replaced", "damaged", "occupied", "no_room")
HOPELESS: Final = {
    EXIT_CONFIGURATION: "cannot start: ",
    EXIT_UNPROVEN: "cannot start: ",
    EXIT_REPLACED: "was replaced by another process of its name, or found damage, and is not restarted: "
    "a person has to look; ",
    EXIT_OCCUPIED: "found its place taken by a live process, and is not restarted: stop that one and start this run again, "
    "which continues; ",
}
"""Exit statuses that a restart would only repeat, and how the error begins; see ``Supervisor._may_pass``."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process, which runs ``module``. Processes of a lower ``stop_order`` are stopped first.

    ``ends_by_itself``: it ends with status 0 when the run is over. If it ends earlier, somebody stopped it, and it is
    restarted like any other process.
    ``is_essential``: the run needs it. Any other process is given up where an essential one would end the run.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    stop_order: int
    grace_s: float
    ends_by_itself: bool = True
    is_essential: bool = True
    place: ProcessPlace = field(default_factory=ProcessPlace)
    python: str = ""
    """Its interpreter; empty: the current one."""

    def enter(self, parent_pid: int) -> None:
        """Run in the new process before its program: it dies with the parent, and stays on its cores."""
        die_with_parent(parent_pid=parent_pid)
        if self.place.cores is not None:
            os.sched_setaffinity(0, self.place.cores)


@dataclass(kw_only=True)
class Child:
    """A process and its restarts."""

    spec: ProcessSpec
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    restarts: deque[float] = field(default_factory=deque)
    num_restarts: int = 0
    last_status: int | None = None
    """The exit status of its last end; -9 for signal 9."""
    said: str = ""
    """The error that it logged at its last end; empty without one."""
    cannot_start: str = ""
    """Why its last start failed, if it said so."""
    state: str = "starting"
    given_up: str = ""
    """Why it is not restarted although the run continues."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None


class Supervisor:
    """Keeps ``specs`` running.

    produces:     running processes
    waits for:    their ends
    unblocked by: an exit, which is followed by a restart with backoff; ``stop``
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_directory: Path,
        clock: Clock,
        *,
        max_restarts: int = MAX_RESTARTS,
        backoff_s: float = BACKOFF_S,
        over_wait_s: float = OVER_WAIT_S,
        log_limits: LogLimits = USUAL_LIMITS,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """``max_restarts`` bounds the restarts of one process within RESTART_WINDOW_S; the n-th of them waits n times
        ``backoff_s``. After a process has ended by itself, ``run_is_over`` is awaited for ``over_wait_s``.
        ``free_bytes``: room on the disk that processes write to; None: that of the directory above ``log_directory``.
        """
        self._max_restarts = max_restarts
        self._over_wait_s = over_wait_s
        log_directory.mkdir(parents=True, exist_ok=True)
        self.children = [Child(spec=spec, log_path=log_directory / f"{spec.name}.log") for spec in specs]
        self._clock = clock
        self._backoff_s = backoff_s
        self._log_limits = log_limits
        self._free_bytes = free_bytes or partial(_free_bytes, log_directory.parent)
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Keep all processes running until ``stop``. Raises: ServiceError with the end of the log when one cannot run."""
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(self._keep(child), name=child.spec.name)

    @property
    def all_ended(self) -> bool:
        """Return whether no process runs and none will be restarted."""
        return all(child.state == "finished" for child in self.children if child.spec.is_essential)

    def run_is_over(self) -> None:
        """Take note that the run is over: a process that ends by itself from now on is finished."""
        self._over.set()

    async def stop(self) -> None:
        """Send SIGTERM in stop order, and SIGKILL after each grace period. Returns when all processes have ended."""
        self._stopping.set()
        for order in sorted({child.spec.stop_order for child in self.children}):
            group = [child for child in self.children if child.spec.stop_order == order]
            await asyncio.gather(*(self._end(child) for child in group))

    async def _keep(self, child: Child) -> None:
        while not self._stopping.is_set():
            status = child.last_status = await self._run_once(child)
            if self._stopping.is_set():
                return
            if status == 0 and child.spec.ends_by_itself and await self._is_over():
                child.state = "finished"
                return
            if self._stopping.is_set():
                return
            if not self._may_pass(child, status) and status in HOPELESS:
                if self._is_given_up(child, f"it {HOPELESS[status]}{last_error(child.log_path)}"):
                    return
                raise ServiceError(f"{child.spec.name} {HOPELESS[status]}{last_error(child.log_path)}")
            if status == EXIT_NO_ROOM:
                await self._wait_for_room(child)
                continue
            now = self._clock.now()
            child.restarts.append(now)
            while child.restarts and now - child.restarts[0] > RESTART_WINDOW_S:
                child.restarts.popleft()
            if len(child.restarts) > self._max_restarts:
                said = child.said or last_error(child.log_path)
                text = f"it ended {len(child.restarts)} times within {RESTART_WINDOW_S:.0f} s: {said}"
                if self._is_given_up(child, text):
                    return
                raise ServiceError(
                    f"{child.spec.name} ended {len(child.restarts)} times within {RESTART_WINDOW_S:.0f} s, last with status "
                    f"{status}, and run.max_restarts is {self._max_restarts}; its log is {child.log_path}: {said}"
                )
            child.num_restarts += 1
            child.state = f"restarting after status {status}"
            why = {"error": child.said} if child.said else {}
            log.warning("process_ended", process=child.spec.name, status=status, restarts=child.num_restarts, **why)
            await until_stopped(self._stopping, self._backoff_s * len(child.restarts))

    def _may_pass(self, child: Child, status: int) -> bool:
        """Whether a process that says it cannot start gets another try: it does not say so for the second time in a row with
        the same reason, and it could start before, with the same configuration, or is not certain."""
        says_so = status in (EXIT_CONFIGURATION, EXIT_UNPROVEN)
        former, child.cannot_start = child.cannot_start, last_error(child.log_path) if says_so else ""
        return says_so and former != child.cannot_start and (child.num_restarts > 0 or status == EXIT_UNPROVEN)

    def _is_given_up(self, child: Child, reason: str) -> bool:
        """Give up a process that the run can do without; False for any other."""
        if child.spec.is_essential:
            return False
        child.state, child.given_up = "given up", reason
        log.warning("process_given_up", process=child.spec.name, reason=reason)
        return True

    async def _wait_for_room(self, child: Child) -> None:
        """Wait for room: a full disk is never a reason to give a process up, however often it ends."""
        child.num_restarts += 1
        child.state = "waits for room on a disk"
        log.warning("no_room", process=child.spec.name, error=last_error(child.log_path), restarts=child.num_restarts)
        before = self._free_bytes()
        for _ in range(ROOM_WAITS):
            if await until_stopped(self._stopping, self._backoff_s) or self._free_bytes() >= before + ROOM_BYTES:
                return

    async def _is_over(self) -> bool:
        """Wait for ``run_is_over``: a rollout may hear of the run's end before the watcher of the broker does."""
        return await until_stopped(self._over, self._over_wait_s)

    async def _run_once(self, child: Child) -> int:
        """Run the process until its end. Returns its status; a machine that cannot start one now counts as its end."""
        try:
            status = await self._start_and_wait(child)
        except (OSError, SubprocessError) as error:
            child.said = f"it cannot be started: {error}"
            return EXIT_FAILED
        # One that a signal has ended logged nothing: the last line may be that of the life before.
        child.said = said_at_end(child.log_path) if status > 0 else ""
        return status

    async def _start_and_wait(self, child: Child) -> int:
        spec = child.spec
        log_file = LogFile(path=child.log_path, limits=self._log_limits)
        with _opened(child.log_path) as output:
            child.process = await asyncio.create_subprocess_exec(
                *module_command(spec.module, *spec.arguments, python=spec.python),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A new session: Ctrl-C reaches only this process, which then stops the others in order.
                start_new_session=True,
                # The others die with this process, however it ends.
                preexec_fn=partial(spec.enter, os.getpid()),
                env={
                    **os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    # A thread that spins while it waits takes a core from another process of the run.
                    "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
                    **spec.place.environment, **log_file.environment(),
                },
            )  # fmt: skip
        child.state = "running"
        if self._stopping.is_set():
            await self._end(child)  # It was starting while the others were stopped.
        return await child.process.wait()

    async def _end(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        child.state = "stopping"
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(child.spec.grace_s):
                await process.wait()
        except TimeoutError:
            log.warning("process_killed", process=child.spec.name, grace_s=child.spec.grace_s)
            process.kill()
            await process.wait()
        child.state = "stopped"


def _opened(path: Path) -> BinaryIO:
    """Open the log of a process that is about to start. If it cannot be opened, the process runs without a log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        log.warning("log_not_written", file=str(path), error=error.strerror)
        return open(os.devnull, "wb")


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0  # Then the process is restarted at its usual time.


def last_error(path: Path) -> str:
    """Return the error that ended a process, if the last line of its log is one; otherwise the last lines."""
    try:
        lines = _last_lines(path)
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    ended_with = _error_of(lines[-1])
    return "\n" + "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) if ended_with is None else ended_with


def said_at_end(path: Path) -> str:
    """Return the error that ended a process, if the last line of its log is one; otherwise nothing."""
    try:
        return _error_of(_last_lines(path)[-1]) or ""
    except OSError:
        return ""


def _last_lines(path: Path) -> list[str]:
    return read_end(path, TAIL_BYTES).rstrip("\n").split("\n")


def _error_of(line: str) -> str | None:
    """Return the text of the error that a process logged at its end; None for any other line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or event.get("event") not in FINAL_EVENTS:
        return None
    return str(event.get("error"))
