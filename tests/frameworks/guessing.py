"""A server of OpenEnv that a test starts, stops and starts again, and the number that its players guess."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.frameworks.played import PYTHONS, ROOT


class GuessServer:
    """Its process, or what stands in its place while it is away."""

    def __init__(self, num_sessions: int) -> None:
        self._num_sessions = num_sessions
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None
        self.known = asyncio.Event()
        """Set when there is a port."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, added: int = 0) -> None:
        """Listen, always at the same port. ``added`` to each number: another one than before is another task."""
        program = [str(PYTHONS / "agents/bin/python"), str(ROOT / "tests/frameworks/guess_server.py")]
        words = [str(self._num_sessions), str(self._port), str(added)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = await asyncio.create_subprocess_exec(
            *program, *words, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert self._process.stdout is not None
        self._port = int(await self._process.stdout.readline())

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def turn_away(self, times: int) -> None:
        """Hang up on everyone that comes to the port of the stopped server, until so many have come."""
        came, enough = 0, asyncio.Event()

        def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal came
            writer.transport.abort()
            came += 1
            if came == times:
                enough.set()

        listener = await asyncio.start_server(hang_up, "127.0.0.1", self._port)
        self._port = listener.sockets[0].getsockname()[1]
        self.known.set()
        async with listener:
            await enough.wait()


@asynccontextmanager
async def guess_server(num_sessions: int) -> AsyncIterator[str]:
    """The address of a running server."""
    async with stoppable_server(num_sessions) as server:
        await server.start()
        yield server.url


@asynccontextmanager
async def stoppable_server(num_sessions: int) -> AsyncIterator[GuessServer]:
    """A server that does not run yet, and does not afterwards."""
    server = GuessServer(num_sessions)
    try:
        yield server
    finally:
        await server.stop()


def number_of(seed: int) -> int:
    return random.Random(seed).randrange(10)
