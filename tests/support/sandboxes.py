"""Sandboxes that do what a test says, for faults of servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from gspo_services.tasks.sandbox import RunOutcome, Sandbox, SandboxError, Sandboxes, SandboxLimits
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.server.server import SandboxServer

BOUNDS = SandboxBounds(max_wall_s=20, max_memory_bytes=1 << 30, idle_s=30)


class ScriptedSandbox:
    """Remembers what is done in it. Commands, unless ``runs`` says what they do: "echo" says its files and input; "hang"
    waits; "flood" says 48 MiB; "fail" fails like a sandbox."""

    def __init__(self, sandboxes: "ScriptedSandboxes") -> None:
        self._sandboxes = sandboxes
        self.files: dict[str, bytes] = {}
        self.prepared: list[str] = []

    async def put(self, files: Mapping[str, bytes]) -> None:
        self.files |= files

    async def prepare(self, command: list[str], limits: SandboxLimits) -> RunOutcome:
        self.prepared.append(" ".join(command))
        return outcome(0 if self._sandboxes.prepares else 1)

    async def run(self, command: list[str], limits: SandboxLimits, stdin: bytes = b"") -> RunOutcome:
        self._sandboxes.num_runs += 1
        self._sandboxes.running.set()
        self._sandboxes.limits.append(limits)
        if self._sandboxes.runs is not None:
            return self._sandboxes.runs(self)
        if command[0] == "hang":
            try:
                await self._sandboxes.goes_on.wait()
            except asyncio.CancelledError:
                self._sandboxes.cancelled.set()
                raise
        if command[0] == "fail":
            raise SandboxError("init has ended")
        if command[0] == "flood":
            return outcome(0, bytes(48 << 20))
        return outcome(0, f"{sorted(self.files)} {self.prepared} {stdin!r}".encode())


class ScriptedSandboxes:
    """See ``Sandbox``."""

    def __init__(
        self,
        max_sandboxes: int = 2,
        *,
        prepares: bool = True,
        runs: Callable[[ScriptedSandbox], RunOutcome] | None = None,
    ) -> None:
        """``prepares``: whether preparations end well. ``runs``: what comes of any command."""
        self.prepares = prepares
        self.runs = runs
        self.limits: list[SandboxLimits] = []
        """Of each run."""
        self._free = asyncio.Semaphore(max_sandboxes)
        self.num_sandboxes = 0
        self.num_open = 0
        self.num_runs = 0
        self.running, self.goes_on, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.full = asyncio.Event()
        """Somebody waits for a sandbox."""

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Sandbox]:
        if self._free.locked():
            self.full.set()
        async with self._free:
            self.num_sandboxes += 1
            self.num_open += 1
            try:
                yield ScriptedSandbox(self)
            finally:
                self.num_open -= 1


def outcome(code: int, stdout: bytes = b"") -> RunOutcome:
    """A run that ended by itself."""
    return RunOutcome(exit_code=code, signal=None, limit=None, stdout=stdout, stderr=b"", wall_s=0.1, cpu_s=0.1)


@asynccontextmanager
async def serving(
    sandboxes: Sandboxes,
    *,
    port: int = 0,
    max_sandboxes: int = 2,
    max_waiting: int = 2,
    key: str = "",
    bounds: SandboxBounds = BOUNDS,
) -> AsyncIterator[tuple[SandboxServer, str, SandboxMetrics]]:
    """A real server of sandboxes: itself, its URL and its metrics."""
    metrics = SandboxMetrics(CollectorRegistry())
    server = SandboxServer(sandboxes, metrics, bounds, max_sandboxes=max_sandboxes, max_waiting=max_waiting, key=key)
    host, port = await server.start("127.0.0.1", port)
    try:
        yield server, f"http://{host}:{port}", metrics
    finally:
        await server.stop(0.05)
