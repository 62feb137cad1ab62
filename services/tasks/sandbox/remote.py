"""Sandboxes on servers: the same interface, and a server's death costs time alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp
import structlog

from gspo_services.tasks.sandbox.connection import CONNECT_S, PLACE_S, RETRY_S, BoxLost, ServerBox, ServerBusy, connect
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
"""A request that ended so many boxes is given up: perhaps it is what ends them."""
ANSWER_S: Final = 60.0
"""What a server may take beyond the program's own time, for what travels."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Which servers, and how long to try."""

    urls: Sequence[str]
    key: str = ""
    patience_s: float = 300.0
    """For a box, and for each thing that it is asked: seconds until a SandboxError."""
    places: int = 64
    """Boxes of this client at the same time, on all servers."""


class RemoteSandbox:
    """Boxes on servers, taken in turn. See ``Sandbox``.

    produces:     boxes
    waits for:    a place at one of the servers
    unblocked by: the end of another box; a server that starts; ``RemoteOptions.patience_s``
    """

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._free = asyncio.Semaphore(options.places)
        self._session: aiohttp.ClientSession | None = None
        self._turn = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["RemoteSandbox"]:
        """Serve until the end of the block. A server that is not there yet is no error, and one that refuses is.

        Raises: SandboxUnavailable.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=PLACE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            self._session = session
            for url in self._options.urls:
                try:
                    await (await connect(session, url, self._options.key, ANSWER_S)).close()
                except (ServerBusy, BoxLost) as error:
                    log.warning("sandbox_server_not_ready", error=str(error))
            yield self

    @asynccontextmanager
    async def box(self) -> AsyncIterator["RemoteBox"]:
        """See ``Sandbox.box``."""
        async with self._free:
            box = RemoteBox(self.connection, self._options.patience_s)
            await box.open()
            try:
                yield box
            finally:
                await box.close()

    async def connection(self, until: float) -> ServerBox:
        """A new box on the next server that has a place, found before ``until`` by the monotonic clock.

        Raises: SandboxUnavailable; SandboxError when the time is over.
        """
        assert self._session is not None, "the sandbox is not open"
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
                except BoxLost as error:
                    reasons.append(str(error))
            if time.monotonic() + retry_s > until:
                raise SandboxError(f"no sandbox within {self._options.patience_s:g} s: {'; '.join(reasons)}")
            await asyncio.sleep(retry_s)


class RemoteBox:
    """A box that outlives its server: on another one everything that was done in it is done again. See ``Box``."""

    def __init__(self, connection: Callable[[float], Awaitable[ServerBox]], patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self._box: ServerBox | None = None
        self._done: list[_Put | _Prepared] = []
        """What the box's folder is made of."""

    async def open(self) -> None:
        """Get a place. Raises: SandboxError."""
        self._box = await self._connection(time.monotonic() + self._patience_s)

    async def close(self) -> None:
        """End the box."""
        box, self._box = self._box, None
        if box is not None:
            with suppress(SandboxError, OSError):
                await box.close()

    async def put(self, files: Mapping[str, bytes]) -> None:
        """See ``Box.put``."""
        check_files(files)
        step = _Put(dict(files))
        await self._ask(step.do)
        self._done.append(step)

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        """See ``Box.prepare``."""
        check_command(command, b"")
        outcome = await self._ask(lambda box: box.run(command, limits, b"", prepares=True))
        self._done.append(_Prepared(command, limits, outcome))
        return outcome

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        """See ``Box.run``."""
        check_command(command, stdin)
        return await self._ask(lambda box: box.run(command, limits, stdin, prepares=False))

    async def _ask(self, do: Callable[[ServerBox], Awaitable[_Answer]]) -> _Answer:
        until = time.monotonic() + self._patience_s
        for death in range(1, MOST_DEATHS + 1):
            try:
                if self._box is None:
                    self._box = await self._again(until)
                return await do(self._box)
            except BoxLost as error:
                await self.close()
                log.warning("sandbox_box_lost", error=str(error), death=death)
                lost = error
        raise SandboxError(f"{MOST_DEATHS} boxes have ended amid the same request, the last one: {lost}") from lost

    async def _again(self, until: float) -> ServerBox:
        """A new box, in which everything was done again. Raises: SandboxError."""
        box = await self._connection(until)
        try:
            for step in self._done:
                await step.do(box)
        except ProgramRefused as error:
            await box.close()
            raise SandboxUnavailable(f"another server refuses what the first one took: {error}") from error
        except BaseException:
            await box.close()
            raise
        return box


@dataclass(frozen=True)
class _Put:
    files: Mapping[str, bytes]

    async def do(self, box: ServerBox) -> None:
        await box.put(self.files)


@dataclass(frozen=True)
class _Prepared:
    command: list[str]
    limits: SandboxLimits
    outcome: RunOutcome

    async def do(self, box: ServerBox) -> None:
        """Raises: SandboxError when it ends in another way than before: the program would run in another box."""
        outcome = await box.run(self.command, self.limits, b"", prepares=True)
        if outcome.succeeded != self.outcome.succeeded:
            raise SandboxError(f"{self.command[0][:100]} ends otherwise on another server")
