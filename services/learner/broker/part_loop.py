"""The sockets of a rank other than 0 in one event loop: the server of its part of versions."""

import asyncio
from collections.abc import Callable

import zmq.asyncio

from gspo_services.learner.broker.port import Publication
from gspo_services.learner.broker.publisher import PartPublisher
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.net import Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings


class PartLoop:
    """Serves the parts that are handed over, one after the other.

    produces:     a rank's part of each version, to rollouts and rank 0
    waits for:    sums and changes
    unblocked by: worker threads
    """

    def __init__(
        self,
        settings: Settings,
        context: zmq.asyncio.Context,
        *,
        clock: Clock,
        metrics: LearnerMetrics,
        rank: int,
        local_rank: int,
    ) -> None:
        """Bind. Raises: EndpointError; ConfigurationError when keys cannot be used."""
        security = Security.load(settings.security, "learner")
        self._publisher = PartPublisher(
            settings, context, security=security, clock=clock, metrics=metrics, rank=rank, local_rank=local_rank
        )
        self.endpoint = self._publisher.endpoint
        self._publications: asyncio.Queue[Publication] = asyncio.Queue(1)

    @property
    def encoding(self) -> bool:
        """Whether sums and a delta are being computed."""
        return self._publisher.encoding

    async def run(self, started: Callable[[], None]) -> None:
        """Run the server until cancelled; ``started`` is called once it runs."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._publisher.start(tasks)
                started()
                while True:
                    publication = await self._publications.get()
                    await self._publisher.serve_part(publication)
                    del publication  # The copy of the weights is not kept while the next one is waited for.
                    self._publications.task_done()
        finally:
            self._publisher.close()

    async def publish(self, publication: Publication) -> None:
        """Hand over a part. One is under way at a time: a second one waits here for the first."""
        await self._publications.join()
        await self._publications.put(publication)

    async def has_room(self) -> None:
        """Wait until what was handed over is served, and let go of the oldest version."""
        await self._publications.join()
        self._publisher.make_room()
