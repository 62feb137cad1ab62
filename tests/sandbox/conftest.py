"""Boxes of real bubblewrap, on this machine and behind HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from prometheus_client import CollectorRegistry

from gspo_services.tasks.sandbox import (
    Box,
    LocalOptions,
    LocalSandbox,
    RunOutcome,
    Sandbox,
    SandboxLimits,
)
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandbox
from gspo_services.tasks.sandbox.server.boxes import BoxBounds
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.server.server import SandboxServer

LIMITS = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=128 << 20)
BOUNDS = BoxBounds(max_wall_s=120, max_memory_bytes=4 << 30, idle_s=60)
KEY = "a key of the tests"


@asynccontextmanager
async def served(options: LocalOptions, *, patience_s: float = 60) -> AsyncIterator[Sandbox]:
    """The sandbox of a server in this process, over real HTTP."""
    async with LocalSandbox(options).opened() as local:
        server = SandboxServer(
            local, SandboxMetrics(CollectorRegistry()), BOUNDS, places=options.places, max_waiting=8, key=KEY
        )
        host, port = await server.start("127.0.0.1", 0)
        try:
            async with RemoteSandbox(
                RemoteOptions(urls=[f"http://{host}:{port}"], key=KEY, patience_s=patience_s)
            ).opened() as remote:
                yield remote
        finally:
            await server.stop(5)


@pytest.fixture(params=["local", "http"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    options = LocalOptions(places=1, spare=0)
    opened = served(options) if request.param == "http" else LocalSandbox(options).opened()
    async with opened as sandbox, sandbox.box() as found:
        yield found


async def python(box: Box, text: str, limits: SandboxLimits = LIMITS, stdin: bytes = b"") -> RunOutcome:
    """A script's run."""
    await box.put({"script.py": text.encode()})
    return await box.run(["python", "script.py"], limits, stdin)


def below(pid: int) -> list[int]:
    """Processes that ``pid`` has started, and theirs. By their numbers alone: psutil compares times that may jump."""
    found = [pid]
    parents = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            parents[process.pid] = process.ppid()
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]
