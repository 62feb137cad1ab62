"""A supervised process for the event loop: it is heard, its output is read, and it ends with all that it has started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from gspo_services.shared.runtime.stray_processes import MARK, ended_as, kill_marked, new_mark
from gspo_services.tasks.supervised.messages import read_frame
from gspo_services.tasks.worker.frames import frame
from gspo_services.tasks.worker.monitor import waited_s

log = structlog.get_logger(__name__)

_TAIL_BYTES: Final = 2000
_MOST_OUTPUT_BYTES: Final = 1024 * 1024
_MOST_LINE_BYTES: Final = 64 * 1024
_LAST_WORDS_S: Final = 1.0
_LAST_MOMENT_S: Final = 1.0


class SupervisedProcess:
    """One process and its descendants."""

    def __init__(self, output: int | Callable[[str], None] = DEVNULL) -> None:
        """``output``: the descriptor for what it prints, or who gets the first MiB of it, by lines."""
        self.mark = new_mark()
        self._descriptor = output if isinstance(output, int) else DEVNULL
        self._printed = None if isinstance(output, int) else _Printed(output)
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.ReadTransport | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_ended = False

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
        """The last that it printed, or "": for a failure's detail."""
        return "" if self._printed is None else self._printed.tail.decode(errors="replace").strip()

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, folder: str | None = None, stdin: int = DEVNULL
    ) -> None:
        """Start it in a session of its own. ``folder``: its working directory; None: this process's.

        Raises: OSError when there is no such program; of it ConnectionAbortedError when ``end`` was called meanwhile.
        """
        output = self._descriptor
        try:
            if self._printed is not None:
                reading, output = os.pipe()
                printed = self._printed
                self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: printed, os.fdopen(reading, "rb", buffering=0)
                )
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=output, stderr=STDOUT, env={**environment, MARK: self.mark},
                start_new_session=True, cwd=folder,
            )  # fmt: skip
        finally:
            if output != self._descriptor:
                os.close(output)
        if self._is_ended:
            await self.end()
            raise ConnectionAbortedError("the process was ended while it started")

    async def start_to_talk(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it with a connection to it: its program opens a ``FrameSocket``. Raises: OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._reader, self._writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            await self.start(command, environment, stdin=theirs.fileno())

    def send(self, body: bytes) -> None:
        """Send a message, unless the process has ended: ``receive`` says so."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(body))

    async def receive(self) -> bytes:
        """The next message. Raises: ConnectionError at the end of the connection; of it BadMessage."""
        assert self._reader is not None
        return await read_frame(self._reader)

    async def wait(self) -> int:
        """Wait until the process itself has ended; what it started may go on. Returns its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def status(self) -> int | None:
        """How the process has ended whose connection has; None when it goes on without one."""
        try:
            # The connection closes a moment before the process has ended, and only then it is known how.
            async with asyncio.timeout(_LAST_MOMENT_S):
                return await self.wait()
        except TimeoutError:
            log.debug("process_closed_its_connection", pid=self.pid)
            return None

    def kill(self) -> None:
        """Begin to end it, and end the connection, which its descendants may hold open: ``end`` does the rest."""
        if self._process is not None and self._process.returncode is None:
            try:
                # It leads a process group of its own, so most of what it started ends with it.
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("process_gone", pid=self._process.pid)
        if self._writer is not None:
            self._writer.transport.abort()

    async def end(self) -> None:
        """End it and everything that it has started. May be called in any state, also twice."""
        self._is_ended = True
        self.kill()
        if self._process is not None:
            await self._process.wait()
        # Also without a process: a start that was cut off may have made one.
        await asyncio.to_thread(kill_marked, self.mark, self.pid)
        if self._output is not None and self._printed is not None:
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
