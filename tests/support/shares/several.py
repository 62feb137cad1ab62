"""Several scripted brokers and a learner's connection to them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import Hello, Message
from gspo_services.learner.broker.batches import Answer
from gspo_services.learner.broker.thread import BrokerThread
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.several import SeveralConnections
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Broker, Learner, Run, Settings
from tests.support.broker.made_batches import MadeBatch
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, zmq_context

NUM_BROKERS = 3
OFTEN_S = 0.05


class Brokers:
    """The brokers' ends, and the learner's client."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.context = context
        self.endpoint = f"ipc://{directory}/batch-{{broker}}"
        self.ends = [self.end(number) for number in range(NUM_BROKERS)]
        self.client = self._client()

    def end(self, number: int) -> ScriptedEnd:
        return ScriptedEnd(self.context, BATCH, self.endpoint.replace("{broker}", str(number)))

    def _client(self) -> BrokerThread:
        settings = Settings(
            broker=Broker(
                work_endpoint=self.endpoint.replace("batch", "work"), batch_endpoint=self.endpoint, num_brokers=NUM_BROKERS
            ),
            batch=BatchSection(groups_per_batch=NUM_BROKERS, mini_batches=1),
            learner=Learner(weights_endpoint=ANY_PORT),
            run=Run(num_batches=100),
        )
        clock = MonotonicClock()
        return BrokerThread(
            settings,
            session="life-1",
            clock=clock,
            health=Health(clock, 60.0),
            metrics=LearnerMetrics(CollectorRegistry()),
            connections=SeveralConnections,
            request_interval_s=OFTEN_S,
        )

    async def welcome(self, number: int, **changes: Any) -> Hello:
        return await self.ends[number].welcome(broker=number, num_brokers=NUM_BROKERS, **changes)

    async def tell(self, message: Any) -> None:
        await asyncio.to_thread(self.client.tell, message)

    async def take(self, timeout_s: float = 20.0) -> Answer | None:
        return await asyncio.to_thread(self.client.take, timeout_s)

    async def reply(self, number: int, *messages: Message) -> None:
        for message in messages:
            await self.ends[number].reply(message)

    async def announce(self, shares: dict[int, MadeBatch]) -> None:
        """Answer a BatchRequest with these brokers' shares, without their parts."""
        for number, share in shares.items():
            await self.ends[number].reply(share.batch, share.arrays)

    async def send_part(self, number: int, share: MadeBatch, part: int) -> None:
        message, arrays = share.parts[part]
        await self.ends[number].reply(message, arrays)


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Brokers]:
    """The learner is at broker 0's door."""
    async with zmq_context() as context:
        brokers = Brokers(context, directory)
        await asyncio.to_thread(brokers.client.__enter__)
        try:
            yield brokers
        finally:
            await asyncio.to_thread(brokers.client.__exit__, None, None, None)


@contextlib.asynccontextmanager
async def connected(directory: Path, **changes: Any) -> AsyncIterator[Brokers]:
    """All brokers have welcomed the learner."""
    async with opened(directory) as brokers:
        for number in range(NUM_BROKERS):
            await brokers.welcome(number, **changes)
        assert await asyncio.to_thread(brokers.client.wait_welcome, 20.0) is not None
        yield brokers
