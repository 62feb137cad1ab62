"""One client's sandbox on a server: requests in, answers out, until either end has enough."""

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from gspo_services.tasks.sandbox import ProgramRefused, RunOutcome, Sandbox, SandboxError, SandboxLimits
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.wire import (
    MAX_OUTPUT_BYTES,
    PutFiles,
    SandboxDone,
    SandboxFailed,
    SandboxOutcome,
    SandboxRefused,
    WireError,
    packed,
    request_of,
)

log = structlog.get_logger()

MOST_PROCESSES: Final = 1024
MOST_OPEN_FILES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class SandboxBounds:
    """What one program may ask for, and how long a sandbox waits to be asked."""

    max_wall_s: float
    max_memory_bytes: int
    idle_s: float

    def check(self, limits: SandboxLimits) -> None:
        """Raises: ProgramRefused for a limit above what this server gives, with the setting that decides it."""
        for name, most, setting in (
            ("wall_s", self.max_wall_s, "sandbox.max_wall_s"),
            ("cpu_s", self.max_wall_s, "sandbox.max_wall_s"),
            ("memory_bytes", self.max_memory_bytes, "sandbox.max_memory_bytes"),
            ("file_bytes", self.max_memory_bytes, "sandbox.max_memory_bytes"),
            ("scratch_bytes", self.max_memory_bytes, "sandbox.max_memory_bytes"),
            ("output_bytes", MAX_OUTPUT_BYTES, ""),
            ("processes", MOST_PROCESSES, ""),
            ("open_files", MOST_OPEN_FILES, ""),
        ):
            asked = getattr(limits, name)
            if asked > most:
                out = f"; raise {setting} where `gspo sandbox` runs, or ask for less" if setting else ""
                raise ProgramRefused(f"the limit {name} is {asked:g}: this server gives {most:g}{out}")


class SandboxConversation:
    """Serves one sandbox over one WebSocket.

    produces:     answers
    waits for:    the client's next request; its program
    unblocked by: the program's limits; ``SandboxBounds.idle_s``, also for whoever takes no answer; the end of the
                  connection, which ends the program
    """

    def __init__(
        self, socket: web.WebSocketResponse, sandbox: Sandbox, bounds: SandboxBounds, metrics: SandboxMetrics
    ) -> None:
        self._socket = socket
        self._sandbox = sandbox
        self._bounds = bounds
        self._metrics = metrics

    async def run(self) -> None:
        """Serve until the client has gone or the sandbox has failed."""
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._socket.receive(), name="sandbox-receive")
            try:
                while (message := await self._next(receiving)) is not None:
                    # Meanwhile a client that hangs up is heard: nobody would read what its program says.
                    receiving = tasks.create_task(self._socket.receive(), name="sandbox-receive")
                    answering = tasks.create_task(self._answer(message.data), name="sandbox-answer")
                    await asyncio.wait([receiving, answering], return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done():
                        answering.cancel()
                        return
                    answer, goes_on = answering.result()
                    await self._send(answer)
                    if not goes_on:
                        return
            finally:
                receiving.cancel()

    async def _send(self, answer: bytes) -> None:
        """Raises: ConnectionError for a client that does not take it."""
        try:
            async with asyncio.timeout(self._bounds.idle_s):
                await self._socket.send_bytes(answer)
        except TimeoutError as error:
            raise ConnectionAbortedError(f"a client took no answer for {self._bounds.idle_s:g} s") from error

    async def _next(self, receiving: "asyncio.Task[WSMessage]") -> WSMessage | None:
        """The next request; None at the end of the connection, and when none comes for too long."""
        await asyncio.wait([receiving], timeout=self._bounds.idle_s)
        if not receiving.done():
            said = f"nothing was asked for {self._bounds.idle_s:g} s"
            await self._socket.close(code=WSCloseCode.GOING_AWAY, message=said.encode())
            return None
        message = receiving.result()
        return message if message.type is WSMsgType.BINARY else None

    async def _answer(self, data: bytes) -> tuple[bytes, bool]:
        """The answer, and whether the sandbox goes on."""
        try:
            request, blobs = request_of(data)
            if isinstance(request, PutFiles):
                await self._sandbox.put(dict(zip(request.names, blobs, strict=True)))
                return packed(SandboxDone()), True
            self._bounds.check(request.limits)
            if request.prepares:
                outcome = await self._sandbox.prepare(request.command, request.limits)
            else:
                outcome = await self._sandbox.run(request.command, request.limits, blobs[0])
        except (WireError, ProgramRefused) as error:
            self._metrics.runs.labels(ending="refused").inc()
            return packed(SandboxRefused(str(error))), True
        except SandboxError as error:
            self._metrics.runs.labels(ending="failed").inc()
            log.warning("sandbox_failed", error=str(error))
            return packed(SandboxFailed(str(error))), False
        self._metrics.run_seconds.observe(outcome.wall_s)
        self._metrics.runs.labels(ending=ending_of(outcome)).inc()
        said = SandboxOutcome(outcome.exit_code, outcome.signal, outcome.limit, outcome.wall_s, outcome.cpu_s)
        return packed(said, outcome.stdout, outcome.stderr), True


def ending_of(outcome: RunOutcome) -> str:
    """The label of a run."""
    return outcome.limit or ("signal" if outcome.signal is not None else "exit")
