"""A rank of the learner is killed while a rollout fetches its part: nobody ever has a mixed version, and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import zmq.asyncio

from gspo_protocol.channels import BATCH, WEIGHTS
from gspo_protocol.messages import Published
from gspo_services.rollout.weights.chunks import FetchError
from gspo_services.rollout.weights.fetch import fetch_newest
from gspo_services.rollout.weights.files import WeightFiles
from gspo_services.rollout.weights.parts import RankConnections
from gspo_services.rollout.weights.replica import DeltaBytes, Replica
from gspo_services.shared.net import PeerClient
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.broker.giving_broker import GivingBroker
from tests.support.learner.tiny_model import save_tiny_model
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, a_client, in_background, zmq_context

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("GSPO_TEST_KILLS", "6"))
PATIENCE_S = 250.0
CONFIG = """
[run]
directory = "{directory}/run"
[model]
path = "{directory}/model"
[batch]
group_size = 2
groups_per_batch = 4
mini_batches = 1
[broker]
batch_endpoint = "{broker}"
[learner]
num_ranks = 2
zero_stage = 3
collective_timeout_s = 60
checkpoint_every_batches = 1
metrics_port = 0
weights_endpoint = "tcp://127.0.0.1:*"
"""


@contextlib.asynccontextmanager
async def learner(work: Path, name: str) -> AsyncIterator[Process]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "gspo_services.learner", str(work / "run.toml")]
    with (work / f"{name}.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def kill_rank(process: Process, rank: int) -> None:
    for child in psutil.Process(process.pid).children():
        if child.environ().get("RANK") == str(rank):
            child.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"rank {rank} is not there")


class Fetching:
    """Fetches whatever was announced, and notes the digests that it had, by version."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self._context = context
        self._numbers = iter(range(10_000))
        self._ranks = RankConnections(self._connected, MonotonicClock(), stall_s=1.0)
        self.replica = Replica(directory)
        self.had: dict[int, set[str]] = {}
        self.failed = 0

    @contextlib.asynccontextmanager
    async def _connected(self, endpoint: str) -> AsyncIterator[PeerClient]:
        client = a_client(self._context, WEIGHTS, endpoint, session=f"s{next(self._numbers)}")
        async with in_background(client.run()):
            yield client

    async def fetch(self, endpoint: str) -> None:
        """Ends after PATIENCE_S at the latest."""
        async with asyncio.timeout(PATIENCE_S), self._connected(endpoint) as client:
            try:
                async with asyncio.timeout(20):
                    await client.connected_welcome()
                found = await fetch_newest(client, self.replica.policy_version, self.replica, stall_s=0.5, ranks=self._ranks)
            except (FetchError, TimeoutError):
                self.failed += 1
                found = None
        if found is not None:
            self.had.setdefault(found.policy_version, set()).add(found.digest)


async def published_at(broker: GivingBroker) -> str:
    """Wait for a version, and return where it is."""
    await broker.until(lambda heard: any(isinstance(each, Published) for each in heard))
    return next(each.endpoint for each in broker.told if isinstance(each, Published))


async def test_no_rollout_ever_has_a_mixed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "model")
    at_first_bytes: list[asyncio.Event] = []

    def told(put: object) -> object:
        def noted(self: object, begin: int, data: memoryview) -> None:
            put(self, begin, data)  # type: ignore[operator]
            for event in at_first_bytes:
                event.set()

        return noted

    for kind in (WeightFiles, DeltaBytes):
        monkeypatch.setattr(kind, "put", told(kind.put))
    async with zmq_context() as context:
        end = ScriptedEnd(context, BATCH, ANY_PORT)
        broker = GivingBroker(end)
        broker.last = 10**6
        content = CONFIG.format(directory=tmp_path, broker=end.endpoint)
        (tmp_path / "run.toml").write_text(content, encoding="utf-8")
        rollout = Fetching(context, tmp_path / "copy")
        announced: dict[int, set[str]] = {}
        async with in_background(broker.serve()):
            for number in range(KILLS):
                broker.told.clear()
                async with learner(tmp_path, f"life-{number}") as process:
                    endpoint = await published_at(broker)
                    begun = asyncio.Event()
                    at_first_bytes[:] = [begun]
                    async with asyncio.TaskGroup() as tasks:
                        fetching = tasks.create_task(rollout.fetch(endpoint), name="fetch")
                        watch = tasks.create_task(begun.wait(), name="first-bytes")
                        await asyncio.wait([fetching, watch], return_when=asyncio.FIRST_COMPLETED)
                        kill_rank(process, number % 2)
                        watch.cancel()
                    async with asyncio.timeout(PATIENCE_S):
                        assert await process.wait(), "the learner ends with its rank"
                for each in broker.told:
                    if isinstance(each, Published):
                        announced.setdefault(each.policy_version, set()).add(each.digest)
            async with learner(tmp_path, "last"):
                broker.told.clear()
                await rollout.fetch(await published_at(broker))
        assert rollout.had, "nothing was ever fetched"
        for version, digests in rollout.had.items():
            assert len(digests) == 1
            assert digests <= announced.get(version, digests)
