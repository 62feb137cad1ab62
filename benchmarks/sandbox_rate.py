"""How many programs a second run in sandboxes, beside bare processes that nothing separates: ``make bench-sandbox``.

Alternating rounds of the same script: in boxes of this machine, one run after the other in each; by a bare ``python -I``.
A box is started for each problem in training, and runs all of its tests; what a start costs is measured as well.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from services.sandbox import LocalOptions, LocalSandbox, SandboxLimits

SCRIPT = b"a, b = map(int, input().split())\nprint(a + b)\n"
LIMITS = SandboxLimits(wall_s=10, cpu_s=5)
ROUNDS = 5


async def in_boxes(sandbox: LocalSandbox, num_boxes: int, num_runs: int) -> float:
    """Seconds for so many runs, on so many boxes at once."""

    async def part() -> None:
        async with sandbox.box() as box:
            await box.put({"sum.py": SCRIPT})
            for index in range(num_runs // num_boxes):
                outcome = await box.run(["python", "sum.py"], LIMITS, f"{index} 1".encode())
                assert outcome.stdout == f"{index + 1}\n".encode()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_boxes):
            tasks.create_task(part())
    return time.perf_counter() - begin


async def bare(script: Path, at_once: int, num_runs: int) -> float:
    """Seconds for so many bare processes."""

    async def part() -> None:
        for index in range(num_runs // at_once):
            process = await asyncio.create_subprocess_exec(
                str(LocalOptions().python), "-I", str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            said, _ = await process.communicate(f"{index} 1".encode())
            assert said == f"{index + 1}\n".encode()

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(part())
    return time.perf_counter() - begin


async def starts(sandbox: LocalSandbox, num: int) -> float:
    """Seconds for a new box and one run in it, one after the other."""
    begin = time.perf_counter()
    for _ in range(num):
        async with sandbox.box() as box:
            await box.put({"sum.py": SCRIPT})
            await box.run(["python", "sum.py"], LIMITS, b"1 1")
    return (time.perf_counter() - begin) / num


async def measure(num_runs: int) -> None:
    """Print the rates."""
    cores = os.cpu_count() or 1
    boxed = unboxed = started = 0.0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sum.py"
        script.write_bytes(SCRIPT)
        async with LocalSandbox(LocalOptions(places=cores, spare=0)).opened() as sandbox:
            await in_boxes(sandbox, cores, 2 * cores)
            for _ in range(ROUNDS):
                boxed += await in_boxes(sandbox, cores, num_runs)
                unboxed += await bare(script, cores, num_runs)
                started += await starts(sandbox, 10)
    rate, bare_rate = ROUNDS * num_runs / boxed, ROUNDS * num_runs / unboxed
    print(f"{cores} at once: {rate:.0f} runs/s in boxes, {bare_rate:.0f} bare processes/s, {rate / bare_rate:.2f} times")
    print(f"a box and its first run: {1000 * started / ROUNDS:.0f} ms")


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="of each kind, in each of the rounds")
    asyncio.run(measure(parser.parse_args().runs))


if __name__ == "__main__":
    main()
