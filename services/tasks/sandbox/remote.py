"""Sandboxes on servers: the same interface, and a server's death costs time alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
import structlog

from gspo_services.tasks.sandbox.connection import (
    ACQUIRE_S,
    CONNECT_S,
    RETRY_S,
    SandboxLost,
    ServerBusy,
    ServerSandbox,
    connect,
)
from gspo_services.tasks.sandbox.interface import (
    ProgramRefused,
    RunOutcome,
    SandboxError,
    SandboxLimits,
    SandboxUnavailable,
    check_command,
    check_files,
)

log = structlog.get_logger()

MOST_DEATHS: Final = 3
"""A request that ended so many sandboxes is given up: perhaps it is what ends them."""
ANSWER_S: Final = 60.0
"""What a server may take beyond the program's own time, for what travels."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Which servers, and how long to try."""

    urls: Sequence[str]
    key: str = ""
    acquire_timeout_s: float = 300.0
    """For a sandbox, and for each thing that it is asked: seconds until a SandboxError."""
    max_sandboxes: int = 64
    """Sandboxes of this client at the same time, on all servers."""


class RemoteSandboxes:
    """Sandboxes on servers, taken in turn. See ``Sandbox``.

    produces:     sandboxes
    waits for:    a free sandbox at one of the servers
    unblocked by: the end of another sandbox; a server that starts; ``RemoteOptions.acquire_timeout_s``
    """

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(options.max_sandboxes)
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["RemoteSandboxes"]:
        """Serve until the end of the block. A server that is not there yet is no error, and one that refuses is.

        Raises: SandboxUnavailable.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ACQUIRE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            self._session = session
            for url in self._options.urls:
                try:
                    await (await connect(session, url, self._options.key, ANSWER_S)).close()
                except (ServerBusy, SandboxLost) as error:
                    log.warning("sandbox_server_not_ready", error=str(error))
            yield self

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator["RemoteSandbox"]:
        """See ``Sandboxes.acquire``."""
        async with self._free:
            sandbox = RemoteSandbox(self.connection, self._options.acquire_timeout_s)
            await sandbox.open()
            try:
                yield sandbox
            finally:
                await sandbox.close()

    async def connection(self, until: float) -> ServerSandbox:
        """A new sandbox on the next server that has one free, found before ``until`` by the monotonic clock.

        Raises: SandboxUnavailable; SandboxError when the time is over.
        """
        assert self._session is not None, "the sandboxes are not open"
        urls = self._options.urls
        while True:
            retry_s, reasons = RETRY_S, []
            for _ in urls:
                url = urls[self._turn % len(urls)]
                self._turn += 1
                try:
                    return await connect(self._session, url, self._options.key, ANSWER_S)
                except ServerBusy as error:
                    retry_s = error.retry_s
                    reasons.append(str(error))
                except SandboxLost as error:
                    reasons.append(str(error))
            if time.monotonic() + retry_s > until:
                raise SandboxError(f"no sandbox within {self._options.acquire_timeout_s:g} s: {'; '.join(reasons)}")
            await asyncio.sleep(retry_s)


class RemoteSandbox:
    """A sandbox that outlives its server: on another one everything that was done in it is done again. See ``Sandbox``."""

    def __init__(self, connection: Callable[[float], Awaitable[ServerSandbox]], acquire_timeout_s: float) -> None:
        self._connection = connection
        self._acquire_timeout_s = acquire_timeout_s
        self._sandbox: ServerSandbox | None = None
        self._done: list[_Put | _Prepared] = []
        """What the sandbox's folder is made of."""

    async def open(self) -> None:
        """Get a sandbox. Raises: SandboxError."""
        self._sandbox = await self._connection(time.monotonic() + self._acquire_timeout_s)

    async def close(self) -> None:
        """End the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            with suppress(SandboxError, OSError):
                await sandbox.close()

    async def put(self, files: Mapping[str, bytes]) -> None:
        """See ``Sandbox.put``."""
        check_files(files)
        step = _Put(dict(files))
        await self._ask(step.do)
        self._done.append(step)

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        """See ``Sandbox.prepare``."""
        check_command(command, b"")
        outcome = await self._ask(lambda sandbox: sandbox.run(command, limits, b"", prepares=True))
        self._done.append(_Prepared(command, limits, outcome))
        return outcome

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        """See ``Sandbox.run``."""
        check_command(command, stdin)
        return await self._ask(lambda sandbox: sandbox.run(command, limits, stdin, prepares=False))

    async def _ask(self, do: Callable[[ServerSandbox], Awaitable[_Answer]]) -> _Answer:
        until = time.monotonic() + self._acquire_timeout_s
        for death in range(1, MOST_DEATHS + 1):
            try:
                if self._sandbox is None:
                    self._sandbox = await self._again(until)
                return await do(self._sandbox)
            except SandboxLost as error:
                await self.close()
                log.warning("sandbox_sandbox_lost", error=str(error), death=death)
                lost = error
        raise SandboxError(f"{MOST_DEATHS} sandboxes have ended amid the same request, the last one: {lost}") from lost

    async def _again(self, until: float) -> ServerSandbox:
        """A new sandbox, in which everything was done again. Raises: SandboxError."""
        sandbox = await self._connection(until)
        try:
            for step in self._done:
                await step.do(sandbox)
        except ProgramRefused as error:
            await sandbox.close()
            raise SandboxUnavailable(f"another server refuses what the first one took: {error}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


@dataclass(frozen=True)
class _Put:
    files: Mapping[str, bytes]

    async def do(self, sandbox: ServerSandbox) -> None:
        await sandbox.put(self.files)


@dataclass(frozen=True)
class _Prepared:
    command: list[str]
    limits: SandboxLimits
    outcome: RunOutcome

    async def do(self, sandbox: ServerSandbox) -> None:
        """Raises: SandboxError when it ends in another way than before: the program would run in another sandbox."""
        outcome = await sandbox.run(self.command, self.limits, b"", prepares=True)
        if outcome.succeeded != self.outcome.succeeded:
            raise SandboxError(f"{self.command[0][:100]} ends otherwise on another server")
