"""A server of OpenEnv that a test starts, and the number that its players guess."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.frameworks.played import PYTHONS, ROOT


@asynccontextmanager
async def guess_server(num_sessions: int) -> AsyncIterator[str]:
    """The address of a running server."""
    program = [str(PYTHONS / "agents/bin/python"), str(ROOT / "tests/frameworks/guess_server.py"), str(num_sessions)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


def number_of(seed: int) -> int:
    return random.Random(seed).randrange(10)
