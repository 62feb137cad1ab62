"""Boxes of real bubblewrap."""

from collections.abc import AsyncIterator
from contextlib import suppress

import psutil
import pytest

from services.sandbox import Box, LocalOptions, LocalSandbox, RunOutcome, SandboxLimits

LIMITS = SandboxLimits(wall_s=10, cpu_s=5, memory_bytes=128 << 20)


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    async with LocalSandbox(LocalOptions(places=1, spare=0)).opened() as sandbox, sandbox.box() as found:
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
