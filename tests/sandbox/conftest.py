"""Sandboxes of real bubblewrap, on this machine and behind HTTP."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from gspo_services.tasks.sandbox import (
    LocalOptions,
    LocalSandboxes,
    RunOutcome,
    Sandbox,
    Sandboxes,
    SandboxLimits,
)
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandboxes
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.server.server import SandboxServer

TIGHT = SandboxLimits(
    wall_s=2, cpu_s=0.5, memory_bytes=64 << 20, processes=12, output_bytes=1 << 20, file_bytes=16 << 20,
    scratch_bytes=32 << 20, open_files=64,
)  # fmt: skip
LIMITS = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=128 << 20)
BOUNDS = SandboxBounds(max_wall_s=120, max_memory_bytes=4 << 30, idle_s=60)
KEY = "a key of the tests"


@asynccontextmanager
async def served(options: LocalOptions, *, acquire_timeout_s: float = 60) -> AsyncIterator[Sandboxes]:
    """The sandbox of a server in this process, over real HTTP."""
    async with LocalSandboxes(options).opened() as local:
        server = SandboxServer(
            local, SandboxMetrics(CollectorRegistry()), BOUNDS, max_sandboxes=options.max_sandboxes, max_waiting=8, key=KEY
        )
        host, port = await server.start("127.0.0.1", 0)
        try:
            async with RemoteSandboxes(
                RemoteOptions(urls=[f"http://{host}:{port}"], key=KEY, acquire_timeout_s=acquire_timeout_s)
            ).opened() as remote:
                yield remote
        finally:
            await server.stop(5)


@pytest.fixture(params=["local", "http"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    options = LocalOptions(max_sandboxes=1, warm=0)
    opened = served(options) if request.param == "http" else LocalSandboxes(options).opened()
    async with opened as sandboxes, sandboxes.acquire() as found:
        yield found


async def python(sandbox: Sandbox, text: str, limits: SandboxLimits = LIMITS, stdin: bytes = b"") -> RunOutcome:
    """A script's run."""
    await sandbox.put({"script.py": text.encode()})
    return await sandbox.run(["python", "script.py"], limits, stdin)


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


def mounts() -> list[str]:
    """Without network namespaces, which other tests of this machine mount."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if not line.startswith("nsfs ")]


def files_in(folder: str) -> set[str]:
    return {name for name in os.listdir(folder) if name.startswith(("bwrap", "gspo-sandbox"))}


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = mounts(), files_in("/tmp"), files_in("/dev/shm")
    yield
    assert not below(os.getpid())
    assert before == (mounts(), files_in("/tmp"), files_in("/dev/shm"))
