"""A process that runs the user's code: its output is read, and it ends with everything that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

import gspo_services.tasks.worker
from gspo_services.shared.runtime.stray_processes import ended_as, kill_marked
from gspo_services.tasks.worker.monitor import waited_s

log = structlog.get_logger(__name__)

WORKER_FILE: Final = Path(gspo_services.tasks.worker.__file__).with_name("main.py")
_TAIL_BYTES: Final = 2000
_MOST_OUTPUT_BYTES: Final = 1024 * 1024
_MOST_LINE_BYTES: Final = 64 * 1024
_LAST_WORDS_S: Final = 1.0


class UserProcess:
    """One process and its descendants."""

    def __init__(self, mark: str, write: Callable[[str], None]) -> None:
        """``mark``: its value of stray_processes.MARK. ``write`` gets the first MiB of what it prints."""
        self._mark = mark
        self._printed = _Printed(write)
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def waited_s(self) -> float:
        """For how many seconds its first thread was ready and had no processor."""
        return 0.0 if self.pid is None else waited_s(f"/proc/{self.pid}/schedstat")

    @property
    def tail(self) -> str:
        """The last that it printed past the worker's own standard output, or "": for a failure's detail."""
        return self._printed.tail.decode(errors="replace").strip()

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_descriptors: Sequence[int] = (),
        *,
        folder: str | None = None,
    ) -> None:
        """Start it in a session of its own. ``folder``: its working directory; None: this process's.

        Raises: OSError when there is no such program.
        """
        reading, writing = os.pipe()
        try:
            self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: self._printed, os.fdopen(reading, "rb", buffering=0)
            )
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=writing, stderr=asyncio.subprocess.STDOUT,
                env=environment, start_new_session=True, pass_fds=pass_descriptors, cwd=folder,
            )  # fmt: skip
        finally:
            os.close(writing)

    async def wait(self) -> int:
        """Wait until the process itself has ended; what it started may go on. Returns its exit status."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        """Begin to end it: ``end`` does the rest."""
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("user_process_gone", pid=self._process.pid)

    async def end(self) -> None:
        """End it and everything that it has started. May be called in any state, also twice."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        # Also without a process: a start that was cut off may have made one.
        await asyncio.to_thread(kill_marked, self._mark, self.pid)
        if self._output is not None:
            await self._printed.read_to_the_end()
            self._output.close()

    def ended_as(self) -> str:
        """How the process ended, for people."""
        return "it runs" if self.returncode is None else ended_as(self.returncode)


class _Printed(asyncio.Protocol):
    """Reads all of what a process prints, so that it never blocks, and keeps the beginning and the end.

    It is written line by line: a read may end within a line, and within a character.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_bytes = 0
        self._unfinished = b""
        self._ended = asyncio.Event()
        self.tail = b""

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        if self._num_bytes < _MOST_OUTPUT_BYTES:
            whole, newline, self._unfinished = (self._unfinished + data).rpartition(b"\n")
            if newline:
                self._write(whole.decode(errors="replace"))
            if len(self._unfinished) > _MOST_LINE_BYTES:
                self._write_unfinished()
            if self._num_bytes + len(data) >= _MOST_OUTPUT_BYTES:
                self._write_unfinished()
                self._write(f"(more than {_MOST_OUTPUT_BYTES} bytes: the rest is left out)")
        self._num_bytes += len(data)

    def _write_unfinished(self) -> None:
        if self._unfinished:
            self._write(self._unfinished.decode(errors="replace"))
        self._unfinished = b""

    def eof_received(self) -> None:
        self._write_unfinished()
        self._ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._write_unfinished()
        self._ended.set()

    async def read_to_the_end(self) -> None:
        """Wait for the last words: they are in the pipe, unless a process that escaped holds it open."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._ended.wait()
        except TimeoutError:
            log.warning("user_process_escaped", meaning="a process that the user's code started cleared its environment")


def worker_command(python: str, settings: str) -> list[str]:
    """The command line of ``services/tasks/worker``; ``settings`` is JSON."""
    return [python, str(WORKER_FILE), settings]
