"""A supervisor with children that tell in a named pipe what they do."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest_asyncio

from gspo_services.cli.run.supervisor import ProcessSpec, Supervisor
from tests.support.clocks import VirtualClock

PATIENCE_S = 60.0


class Pipe:
    """What the children report, line by line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reader = asyncio.StreamReader()

    async def line(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await self._reader.readline()).decode().strip()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator["Pipe"]:
        # For reading and writing, so that it does not end when a child closes it.
        file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        yield self
        transport.close()

    async def started(self) -> tuple[str, int]:
        """Name and process id of the next child that reports its start."""
        name, event, pid = (await self.line()).split()
        assert event == "started"
        return name, int(pid)


@pytest_asyncio.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    async with Pipe(tmp_path / "pipe").opened() as pipe:
        yield pipe


def spec(pipe: Pipe, name: str, *behaviour: str, stop_order: int = 0, grace_s: float = 30.0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        module="tests.support.processes.child",
        arguments=(name, str(pipe.path), *behaviour),
        stop_order=stop_order,
        grace_s=grace_s,
    )


@contextlib.asynccontextmanager
async def supervised(
    pipe: Pipe,
    specs: Sequence[ProcessSpec],
    clock: VirtualClock | None = None,
    free_bytes: Callable[[], int] | None = None,
    backoff_s: float = 0.001,
) -> AsyncIterator[Supervisor]:
    """Runs until the block ends, then stops everything."""
    logs = pipe.path.parent / "logs"
    clock = clock or VirtualClock()
    supervisor = Supervisor(specs, logs, clock, backoff_s=backoff_s, over_wait_s=0.01, free_bytes=free_bytes)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(supervisor.run())
        try:
            yield supervisor
        finally:
            await supervisor.stop()
        await keeping
