"""The learner's end of the weight channel, without a learner."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_protocol.channels import WEIGHTS
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights import SnapshotStore, WeightServer
from gspo_services.shared.net import PLAINTEXT, Authenticator, RouterChannel
from gspo_services.shared.runtime.clock import MonotonicClock

ANY_PORT: Final = "tcp://127.0.0.1:*"


class Serving:
    """A weight server: its endpoint, the served versions, and the costs."""

    def __init__(self, store: SnapshotStore, endpoint: str, registry: CollectorRegistry) -> None:
        self.store = store
        self.endpoint = endpoint
        self._registry = registry

    @property
    def sent_bytes(self) -> float:
        """Bytes of weights sent to all receivers."""
        return self._registry.get_sample_value("gspo_learner_weight_bytes_sent_total") or 0.0

    @property
    def num_sources_left(self) -> int:
        """How often a receiver came back from the weight peer to which it was sent."""
        return int(self._registry.get_sample_value("gspo_learner_weight_sources_failed_total") or 0)


@asynccontextmanager
async def serving() -> AsyncIterator[Serving]:
    """Run a weight server inside the context."""
    context = zmq.asyncio.Context()
    try:
        store, registry = SnapshotStore(), CollectorRegistry()
        metrics = LearnerMetrics(registry)
        authenticator = Authenticator(context, PLAINTEXT, MonotonicClock(), metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, ANY_PORT, authenticator)
        server = WeightServer(channel, store, metrics)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(authenticator.run(), name="authenticator"),
                tasks.create_task(server.run(), name="weights"),
            ]
            yield Serving(store, channel.endpoint, registry)
            for task in running:
                task.cancel()
    finally:
        context.destroy(linger=0)
