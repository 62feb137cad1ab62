"""How many programs a second run in sandboxes, beside bare processes that nothing separates: ``make bench-sandbox``.

Alternating rounds of the same script: in sandboxes of this machine, one run after the other in each; by ``python -I`` alone.
A sandbox is started for each problem in training, and runs all of its tests; what a start costs is measured as well.
The processor time of a run counts the caller, init and all processes of the run. Unlike the rate it means something on
a busy machine as well: one that is idle does no more than ``cores / time`` runs a second.
"""

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry

from gspo_services.tasks.sandbox import LocalOptions, LocalSandboxes, Sandbox, Sandboxes, SandboxLimits
from gspo_services.tasks.sandbox.remote import RemoteOptions, RemoteSandboxes
from gspo_services.tasks.sandbox.server.conversation import SandboxBounds
from gspo_services.tasks.sandbox.server.metrics import SandboxMetrics
from gspo_services.tasks.sandbox.server.server import SandboxServer

SCRIPT = b"a, b = map(int, input().split())\nprint(a + b)\n"
LIMITS = SandboxLimits(wall_s=10, cpu_s=5)
ROUNDS = 5


@dataclass
class Cost:
    """Of many runs together, in seconds."""

    wall_s: float = 0.0
    processor_s: float = 0.0

    def text(self, what: str, num_runs: int) -> str:
        """One line."""
        rate, each = num_runs / self.wall_s, 1000 * self.processor_s / num_runs
        return f"{what:16s} {rate:6.0f} runs/s   {each:6.2f} ms of a processor each"


def own_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ended_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def living_s() -> float:
    """Processor time of everything that this process has started and that goes on, and of what that has started."""
    return sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children(recursive=True))


async def in_sandboxes(sandboxes: Sequence[Sandbox], num_runs: int, cost: Cost) -> None:
    """So many runs, on all sandboxes at once."""

    async def part(sandbox: Sandbox) -> None:
        for index in range(num_runs // len(sandboxes)):
            outcome = await sandbox.run(["python", "sum.py"], LIMITS, f"{index} 1".encode())
            assert outcome.stdout == f"{index + 1}\n".encode()

    begin, used = time.perf_counter(), own_s() + living_s()
    async with asyncio.TaskGroup() as tasks:
        for sandbox in sandboxes:
            tasks.create_task(part(sandbox))
    cost.wall_s += time.perf_counter() - begin
    cost.processor_s += own_s() + living_s() - used


async def bare(script: Path, at_once: int, num_runs: int, cost: Cost) -> None:
    """So many bare processes."""

    async def part() -> None:
        for index in range(num_runs // at_once):
            process = await asyncio.create_subprocess_exec(
                str(LocalOptions().python), "-I", str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            said, _ = await process.communicate(f"{index} 1".encode())
            assert said == f"{index + 1}\n".encode()

    begin, used = time.perf_counter(), own_s() + ended_s()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(part())
    cost.wall_s += time.perf_counter() - begin
    cost.processor_s += own_s() + ended_s() - used


async def starts(sandboxes: LocalSandboxes, num: int) -> float:
    """Seconds for a new sandbox and one run in it, one after the other."""
    begin = time.perf_counter()
    for _ in range(num):
        async with sandboxes.acquire() as sandbox:
            await sandbox.put({"sum.py": SCRIPT})
            await sandbox.run(["python", "sum.py"], LIMITS, b"1 1")
    return (time.perf_counter() - begin) / num


@asynccontextmanager
async def over_http(sandboxes: LocalSandboxes, max_sandboxes: int) -> AsyncIterator[RemoteSandboxes]:
    """The same sandboxes through a server and a client, both in this process."""
    bounds = SandboxBounds(max_wall_s=60, max_memory_bytes=4 << 30, idle_s=600)
    server = SandboxServer(
        sandboxes, SandboxMetrics(CollectorRegistry()), bounds, max_sandboxes=max_sandboxes, max_waiting=max_sandboxes
    )
    host, port = await server.start("127.0.0.1", 0)
    try:
        async with RemoteSandboxes(RemoteOptions(urls=[f"http://{host}:{port}"])).opened() as remote:
            yield remote
    finally:
        await server.stop(5)


async def sandboxes_of(sandboxes: Sandboxes, num: int, stack: AsyncExitStack) -> list[Sandbox]:
    """So many sandboxes with the script, and with the first runs behind them."""
    found = [await stack.enter_async_context(sandboxes.acquire()) for _ in range(num)]
    for sandbox in found:
        await sandbox.put({"sum.py": SCRIPT})
    await in_sandboxes(found, 2 * num, Cost())
    return found


async def measure(num_runs: int) -> None:
    """Print the rates."""
    cores = os.cpu_count() or 1
    sandboxed, served, bare_cost, started = Cost(), Cost(), Cost(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sum.py"
        script.write_bytes(SCRIPT)
        async with (
            LocalSandboxes(LocalOptions(max_sandboxes=2 * cores + 1, warm=0)).opened() as sandboxes,
            AsyncExitStack() as stack,
        ):
            remote = await stack.enter_async_context(over_http(sandboxes, cores + 1))
            here, there = await sandboxes_of(sandboxes, cores, stack), await sandboxes_of(remote, cores, stack)
            for _ in range(ROUNDS):
                await in_sandboxes(here, num_runs, sandboxed)
                await in_sandboxes(there, num_runs, served)
                await bare(script, cores, num_runs, bare_cost)
                started += await starts(sandboxes, 10)
    print(sandboxed.text(f"{cores} sandboxes", ROUNDS * num_runs))
    print(served.text(f"{cores} over HTTP", ROUNDS * num_runs))
    print(bare_cost.text(f"{cores} bare at once", ROUNDS * num_runs))
    print(f"sandboxes beside bare: {bare_cost.wall_s / sandboxed.wall_s:.2f} times the rate")
    print(f"a sandbox and its first run: {1000 * started / ROUNDS:.0f} ms")


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="of each kind, in each of the rounds")
    asyncio.run(measure(parser.parse_args().runs))


if __name__ == "__main__":
    main()
