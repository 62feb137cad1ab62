"""Messages received and not yet handled are bounded in bytes, however large each of them is."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from protocol.channels import WORK
from protocol.codec import Array
from protocol.limits import MAX_QUEUED_BYTES
from protocol.messages import Hello, Message
from services.broker.metrics import BrokerMetrics
from services.broker.metrics_file import MetricsFile
from services.broker.service import BrokerService
from services.runtime.clock import MonotonicClock
from services.runtime.net.channel import Incoming
from services.runtime.telemetry import Health
from tests.support.broker.ledger import LedgerHarness

MESSAGE_BYTES = MAX_QUEUED_BYTES // 4
NUM_MESSAGES = 100


class Flood:
    """A channel with many large messages; answers leave when the test says so."""

    def __init__(self) -> None:
        self.num_received = 0
        self.num_answered = 0
        self.answering = asyncio.Event()
        self.all_answered = asyncio.Event()

    async def receive(self) -> Incoming:
        await asyncio.sleep(0)
        if self.num_received == NUM_MESSAGES:
            await asyncio.get_running_loop().create_future()
        self.num_received += 1
        return Incoming(peer=b"r", received=None, error="large", num_bytes=MESSAGE_BYTES)

    async def send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> bool:
        await self.answering.wait()
        self.num_answered += 1
        if self.num_answered == NUM_MESSAGES:
            self.all_answered.set()
        return True

    def objection(self, incoming: Incoming, hello: Hello) -> str:
        return ""

    def admits(self, incoming: Incoming) -> bool:
        return True


async def test_nothing_is_read_while_the_queue_is_full_of_bytes_and_everything_afterwards(tmp_path: Path) -> None:
    world, flood, clock, registry = LedgerHarness(), Flood(), MonotonicClock(), CollectorRegistry()
    broker = BrokerService(
        world.ledger,
        world.store,
        {WORK: flood},  # type: ignore[dict-item]
        {},
        MetricsFile(tmp_path / "metrics.jsonl"),
        BrokerMetrics(registry),
        Health(clock, 60.0),
        clock,
        clock.now,
        commit_interval_s=0.0,
        temperature=1.0,
    )
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(broker.run(stop))
        for _ in range(2000):
            await asyncio.sleep(0)
        assert flood.num_received == 4, "as many as fit, although the queue has room for a thousand messages"
        flood.answering.set()
        await flood.all_answered.wait()
        stop.set()
    assert registry.get_sample_value("gspo_broker_refused_total", {"type": "", "reason": "undecodable"}) == NUM_MESSAGES
