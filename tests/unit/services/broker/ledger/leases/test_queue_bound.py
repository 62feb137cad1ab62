"""Messages received and not yet handled are bounded, and the sockets are read all the same."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WORK
from gspo_protocol.codec import Array
from gspo_protocol.limits import MAX_UNSEQUENCED
from gspo_protocol.messages import Hello, Message
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.metrics_file import MetricsFile
from gspo_services.broker.rounds import MAX_EVENTS_PER_COMMIT
from gspo_services.broker.service import BrokerService
from gspo_services.shared.net.channel import Incoming
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from tests.support.broker.ledger import LedgerHarness

CREDIT = WORK.window + MAX_UNSEQUENCED
NUM_MESSAGES = 4 * CREDIT


class Flood:
    """A channel with many messages of one peer, then one of another; answers leave when the test says so."""

    def __init__(self, num_bytes: int) -> None:
        self.num_received = 0
        self.answered: list[bytes] = []
        self.all_received = asyncio.Event()
        self.answering = asyncio.Event()
        self.quiet_peer_answered = asyncio.Event()
        self._num_bytes = num_bytes

    async def receive(self) -> Incoming:
        await asyncio.sleep(0)
        if self.num_received > NUM_MESSAGES:
            self.all_received.set()
            await asyncio.get_running_loop().create_future()
        self.num_received += 1
        peer = b"flooder" if self.num_received <= NUM_MESSAGES else b"quiet"
        return Incoming(peer=peer, received=None, error="large", num_bytes=self._num_bytes)

    async def send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> bool:
        await self.answering.wait()
        self.answered.append(peer)
        if peer == b"quiet":
            self.quiet_peer_answered.set()
        return True

    def objection(self, incoming: Incoming, hello: Hello) -> str:
        return ""

    def unwanted(self, incoming: Incoming) -> None:
        """Nothing happens to the flooder here."""

    def admits(self, incoming: Incoming) -> bool:
        return True


async def flooded(tmp_path: Path, num_bytes: int) -> tuple[Flood, float]:
    """Returns the flood, once it was handled, and how many of its messages were dropped."""
    world, flood, clock, registry = LedgerHarness(), Flood(num_bytes), MonotonicClock(), CollectorRegistry()
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
        part_tokens=2**18,
    )
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(broker.run(stop))
        await flood.all_received.wait()
        assert flood.answered == []
        flood.answering.set()
        await flood.quiet_peer_answered.wait()
        stop.set()
    return flood, registry.get_sample_value("gspo_broker_messages_dropped_total", {"channel": "work"}) or 0.0


async def test_everything_is_read_and_what_is_above_a_peers_credit_is_dropped(tmp_path: Path) -> None:
    flood, dropped = await flooded(tmp_path, 100)
    # The first round had begun with one or two messages, and a full one was decided behind it.
    assert 0 <= NUM_MESSAGES - CREDIT - MAX_EVENTS_PER_COMMIT - dropped <= 2
    assert flood.answered.count(b"flooder") == NUM_MESSAGES - dropped
    assert flood.answered.index(b"quiet") <= MAX_EVENTS_PER_COMMIT + 4, "the quiet peer's turn comes with the next round"


async def test_large_messages_are_dropped_above_the_credit_in_bytes(tmp_path: Path) -> None:
    _, dropped = await flooded(tmp_path, WORK.max_waiting_bytes // 4)
    # Two more are in the round behind the first.
    assert 0 <= NUM_MESSAGES - 4 - 2 - dropped <= 2
