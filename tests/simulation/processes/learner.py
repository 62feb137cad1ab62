"""``gspo learner`` in virtual time, one rank."""

import asyncio
import random
import threading
from typing import Any

from prometheus_client import CollectorRegistry

from gspo_services.learner.broker.loop import BrokerLoop
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.learner.broker.port import Answer
from gspo_services.learner.broker.thread import MAX_ARRIVALS
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.service import LearnerService
from gspo_services.shared.runtime.telemetry import Health
from tests.simulation.learner import SimBackground, SimBrokerClient, SimTrainer, Turns
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes.machinery import MAX_QUIET_S, Machinery


class LearnerProcess:
    """``gspo learner``, one rank."""

    def __init__(
        self,
        machinery: Machinery,
        process: Process,
        rng: random.Random,
        *,
        batch_s: float,
        weights_endpoint: str,
        has_tables: bool,
        is_deterministic: bool,
    ) -> None:
        self._machinery = machinery
        self._process = process
        self._weights_endpoint = weights_endpoint
        self._arrived: asyncio.Queue[Answer] = asyncio.Queue(maxsize=MAX_ARRIVALS)
        self.trainer = SimTrainer(
            process, rng, machinery.audit, batch_s=batch_s, has_tables=has_tables, is_deterministic=is_deterministic
        )

    async def run(self, stop: asyncio.Event) -> None:
        machinery = self._machinery
        learner = machinery.settings.learner.model_copy(update={"weights_endpoint": self._weights_endpoint})
        settings = machinery.settings.model_copy(update={"learner": learner})
        context: Any = SimContext(machinery.network, self._process)
        health = Health(machinery.clock, MAX_QUIET_S)
        metrics = LearnerMetrics(CollectorRegistry())
        broker_loop = BrokerLoop(
            settings,
            context,
            session=self._process.session,
            clock=machinery.clock,
            health=health,
            metrics=metrics,
            arrived=self._arrived.put_nowait,
        )
        client = SimBrokerClient(broker_loop, self._arrived, machinery.audit)
        self.trainer.broker = client
        client.trainer = self.trainer
        trainer: Any = self.trainer
        stopped = threading.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = SimBackground(tasks)
                service = LearnerService(
                    settings,
                    trainer,
                    client,
                    clock=machinery.clock,
                    health=health,
                    metrics=metrics,
                    stop=stopped,
                    train=trainer.train,
                    background=background,
                    life=self._process.session,
                )
                client.turns = background.turns = Turns(service.run)
                talking = tasks.create_task(broker_loop.run(lambda: None))
                stopping = tasks.create_task(_forward(stop, stopped))
                await client.turns.run()
                talking.cancel()
                stopping.cancel()
        finally:
            context.destroy()

    def check_bounds(self) -> None:
        """G6: every queue and table has a bound."""
        arrived = self._arrived.qsize()
        self._machinery.audit.require(
            arrived <= CREDIT + 2,
            "G6 bounded",
            lambda: f"{arrived} answers wait in the learner, which has room for few parts",
        )


async def _forward(stop: asyncio.Event, stopped: threading.Event) -> None:
    """Pass SIGTERM on to the training thread."""
    await stop.wait()
    stopped.set()
