"""Real processes that are suspended in the middle of their work, and go on: nothing aborts or is lost."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.broker.process import BrokerProcess, broker_process

SUSPENDED_S = 8.0
NUM_BATCHES = 40
PATIENCE_S = 120.0


@asynccontextmanager
async def suspended(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def trained(broker: BrokerProcess) -> list[int]:
    """The batches in metrics.jsonl, which is there once one was trained."""
    with suppress(FileNotFoundError):
        return [line["batch"] for line in broker.metrics_lines() if line["event"] == "batch"]
    return []


async def trains_on(broker: BrokerProcess) -> None:
    """Wait for two more batches."""
    before = len(trained(broker))
    while len(trained(broker)) < before + 2:  # noqa: ASYNC110 - it waits for another process's file
        await asyncio.sleep(0.05)


async def test_suspended_peers_and_a_suspended_broker_go_on_where_they_were(tmp_path: Path) -> None:
    async with broker_process(tmp_path, run={"num_batches": NUM_BATCHES}, broker={"lease_s": 3.0}) as broker:
        command = ("-m", "tests.support.processes.scripted_peers", broker.work_endpoint, broker.batch_endpoint)
        peers = await asyncio.create_subprocess_exec(sys.executable, *command)
        try:
            async with asyncio.timeout(PATIENCE_S):
                for pid in (peers.pid, broker.pid):
                    await trains_on(broker)
                    async with suspended(pid):
                        await asyncio.sleep(SUSPENDED_S)  # What is tested is that so much time passes.
                await trains_on(broker)
                assert await peers.wait() == 0
        finally:
            if peers.returncode is None:
                peers.kill()
                await peers.wait()
        assert await broker.terminate() == 0
    assert trained(broker) == list(range(NUM_BATCHES))
    assert broker.count("broker_started") == 1
    assert broker.count("lease_expired") > 0, "the peers were away for longer than their leases"
