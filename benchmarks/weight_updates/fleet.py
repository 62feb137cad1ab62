"""A snapshot and a delta to a fleet over loopback, with and without weight peers: bytes that the learner sent.

The receivers share two processes: the benchmark counts bytes, and 32 processes on two cores would only wait for each other.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks.weight_updates.serving import serving
from benchmarks.weight_updates.versions import must, random_versions
from gspo_services.learner.weights import encode_delta
from gspo_services.learner.weights.snapshot import Delta, Snapshot

NUM_BYTES: Final = 16 * 1024 * 1024
NUM_PROCESSES: Final = 2
LIMIT_S: Final = 300.0
"""Time limit for a version to reach every receiver."""


def fleet(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for each number of receivers, without weight peers and with them.

    Raises: TimeoutError when a version does not reach every receiver within LIMIT_S; RuntimeError when a receiver ends.
    """
    first, second = random_versions(NUM_BYTES, 2, 0.01)
    delta = must(encode_delta(first, second))
    rows = []
    for weight_peers in (False, True):
        for number in numbers:
            rows.append(asyncio.run(_one(number, weight_peers, (first, second), delta)))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


async def _one(number: int, weight_peers: bool, versions: tuple[Snapshot, Snapshot], delta: Delta) -> dict[str, Any]:
    async with serving() as served, _receivers(served.endpoint, number, weight_peers) as processes:
        begin = time.perf_counter()
        served.store.add(versions[0])
        await _until_held(processes, number, versions[0])
        snapshot_s, snapshot_bytes = time.perf_counter() - begin, served.sent_bytes
        begin = time.perf_counter()
        served.store.add(versions[1], delta)
        await _until_held(processes, number, versions[1])
        delta_s, delta_bytes = time.perf_counter() - begin, served.sent_bytes - snapshot_bytes
        return {
            "receivers": number,
            "weight peers": "yes" if weight_peers else "no",
            "snapshot: sent / full": round(snapshot_bytes / versions[0].manifest.num_bytes, 2),
            "snapshot: s until all hold it": round(snapshot_s, 1),
            "delta: sent / delta": round(delta_bytes / delta.manifest.num_bytes, 2),
            "delta: s until all hold it": round(delta_s, 1),
            "peers left": served.num_sources_left,
        }


@asynccontextmanager
async def _receivers(
    endpoint: str, number: int, weight_peers: bool
) -> AsyncIterator[list[tuple[asyncio.subprocess.Process, int]]]:
    """Start processes, each with its number of receivers."""
    names = [f"rollout-{index}" for index in range(number)]
    shares = [names[first::NUM_PROCESSES] for first in range(min(NUM_PROCESSES, number))]
    processes: list[tuple[asyncio.subprocess.Process, int]] = []
    try:
        for share in shares:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.weight_updates.receivers", endpoint),
                *(["--weight-peers"] if weight_peers else []),
                *share,
                stdout=asyncio.subprocess.PIPE,
            )
            processes.append((process, len(share)))
        yield processes
    finally:
        for process, _ in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _until_held(processes: Sequence[tuple[asyncio.subprocess.Process, int]], number: int, snapshot: Snapshot) -> None:
    assert sum(share for _, share in processes) == number

    async def read(process: asyncio.subprocess.Process, missing: int) -> None:
        assert process.stdout is not None
        while missing:
            line = (await process.stdout.readline()).decode()
            # Lines of the structured log also arrive here.
            if line.split()[1:] == [str(snapshot.policy_version), snapshot.manifest.digest]:
                missing -= 1
            elif "source_failed" in line:
                print(line.strip(), file=sys.stderr, flush=True)
            elif not line:
                raise RuntimeError("a receiver ended")

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        for process, share in processes:
            tasks.create_task(read(process, share), name="receivers")
