"""The learner's connections to all brokers that share its run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from gspo_protocol.messages import (
    BatchFailed,
    BatchRequest,
    EndOfRun,
    Heartbeat,
    LedgerCommit,
    Published,
    Trained,
    Welcome,
)
from gspo_services.learner.broker import (
    Answer,
    BatchAnnounced,
    BrokerConnection,
    BrokerConnections,
    OpenConnection,
    Question,
)
from gspo_services.learner.several.merged_batch import MergedBatch
from gspo_services.learner.several.merged_welcome import merged_welcome
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import Settings

log = structlog.get_logger()

WITHOUT_FIRST_S: Final = 5.0
"""Silence of broker 0 after which nothing is said to the others: by then it may give the run to another learner."""


class SeveralConnections(BrokerConnections):
    """See ``BrokerConnections``. Brokers hear everything in their order, and broker 0's Welcome comes before the others are
    asked for theirs: no two learners have some brokers each.

    produces:     the batch of all shares, part by part
    waits for:    every broker
    unblocked by: their answers; ``part_taken``
    """

    def __init__(self, settings: Settings, open_connection: OpenConnection, arrived: Callable[[Answer], None]) -> None:
        """Connect to broker 0. Raises: as ``MakeConnections``."""
        self._num_batches = settings.run.num_batches
        self._arrived = arrived
        self._batch: MergedBatch | None = None
        """Of the last request."""
        self._connections = [open_connection(number, self._heard) for number in range(settings.broker.num_brokers)]
        self._connections[0].open()
        self._is_quiet = False

    @property
    def commits(self) -> Sequence[LedgerCommit | None]:
        return [connection.commit for connection in self._connections]

    @property
    def endpoint(self) -> str:
        return next((connection for connection in self._connections if connection.owes), self._connections[0]).endpoint

    @property
    def reason_to_wait(self) -> str:
        connection = min(self._connections, key=self._readiness)
        name = f"broker {connection.number}"
        if connection.refused:
            return f"{name}: {connection.refused}"
        if not connection.connected:
            return f"no answer from {name} at {connection.endpoint}"
        return f"{name}: {connection.pending}" if connection.pending else name

    def _readiness(self, connection: BrokerConnection) -> int:
        """The lower, the more it is this broker that is waited for."""
        if connection.refused:
            return 0
        if not connection.connected:
            return 1
        waits = self._batch is not None and (
            self._batch.waits_for(connection.number) or self._batch.next_broker == connection.number
        )
        return 2 if waits else 3

    @property
    def scores(self) -> Mapping[int, float | None]:
        """Broker 0 evaluates."""
        return self._connections[0].scores

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Run the connection to broker 0 and, once it has welcomed this learner, the connections to the others."""
        for connection in self._connections:
            if connection.number:
                await self._connections[0].welcome()
                # Only now: nobody reads the monitor of a connection that does not run.
                connection.open()
            tasks.create_task(connection.run(), name=f"batch-client-{connection.number}")
            tasks.create_task(connection.receive(), name=f"receive-{connection.number}")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        # Those of the others are asked for after broker 0's.
        self.welcomes = [await connection.welcome() for connection in self._connections]
        return merged_welcome(self.welcomes)

    async def tell(self, message: Question) -> None:
        if isinstance(message, BatchRequest):
            self._batch = MergedBatch(message.index, len(self._connections))
            for connection in self._connections:
                connection.want(message)
        elif not isinstance(message, BatchFailed):
            for connection in self._connections:
                connection.resume_at(message.next_batch)
        for connection in self._connections:
            await connection.send(message)

    def reports(self, trained: Trained) -> Sequence[Trained]:
        if self._batch is None or self._batch.index != trained.index:
            return [trained] * len(self._connections)
        return self._batch.reports(trained)

    async def report(self, reports: Sequence[Trained]) -> None:
        for connection, trained in zip(self._connections, reports, strict=True):
            await connection.announce(trained)

    async def announce(self, published: Published) -> None:
        for connection in self._connections:
            await connection.announce(published)

    def acknowledged(self, next_batch: int) -> bool:
        return all(connection.acknowledged_batches() >= next_batch for connection in self._connections)

    async def flushed(self) -> None:
        for connection in self._connections:
            await connection.flushed()

    # --- received ------------------------------------------------------------------------------------------------------

    async def _heard(self, connection: BrokerConnection, answer: Answer) -> None:
        """A broker has answered the last request, or the next part of its share has come."""
        # A connection is asked only in a round.
        assert self._batch is not None
        begins_again = self._batch.hear(connection.number, answer)
        self._hand_over(self._batch)
        if begins_again:
            again = [each for each in self._connections if isinstance(self._batch.answer(each.number), BatchAnnounced)]
            # All of them at once: a part that comes meanwhile is not the first one.
            for each in again:
                each.begin_again()
            for each in again:
                await each.ask_for_parts()
        # At the end all brokers end by themselves, and broker 0 only after the last evaluation.
        if self._batch.end is not None and self._batch.index < self._num_batches:
            await self._stop_the_others(self._batch, self._batch.end)

    async def _stop_the_others(self, batch: MergedBatch, end: EndOfRun) -> None:
        ended = next(connection for connection in self._connections if batch.answer(connection.number) is end)
        for connection in self._connections:
            if batch.waits_for(connection.number):
                await connection.stop(f"broker {ended.number} has ended the run: {end.reason}")

    async def part_taken(self) -> None:
        if self._batch is None:
            return
        broker = self._batch.took()
        self._hand_over(self._batch)
        if broker is not None:
            await self._connections[broker].part_taken()

    def _hand_over(self, batch: MergedBatch) -> None:
        try:
            ready = batch.ready()
        except ValueError as error:
            raise ServiceError(f"the brokers' shares of batch {batch.index} do not make one batch: {error}") from error
        for answer in ready:
            self._arrived(answer)

    # --- repeated ------------------------------------------------------------------------------------------------------

    async def repeat(self, not_ready: Callable[[str], None]) -> None:
        for connection in self._connections:
            # A person must see that the broker refuses this learner's key.
            if connection.refused:
                not_ready(f"broker {connection.number}: {connection.refused}")
            await connection.ask_again()
            await connection.ask_for_silent_parts()

    async def beat(self, heartbeat: Heartbeat) -> None:
        self._follow_first()
        for connection in self._connections:
            await connection.send(heartbeat)

    def _follow_first(self) -> None:
        """Who is cut off from broker 0 keeps no place at the others: another learner that broker 0 admits needs all."""
        first, *others = self._connections
        # At the end of a run broker 0 ends when it is done, and the others still have to hear of it.
        has_ended = self._batch is not None and isinstance(self._batch.answer(first.number), EndOfRun)
        quiet = first.silent_s > WITHOUT_FIRST_S and not has_ended
        if any(connection.is_open for connection in others) and quiet != self._is_quiet:
            self._is_quiet = quiet
            log.info("quiet_without_broker_0" if quiet else "broker_0_is_back", silent_s=round(first.silent_s, 1))
        for connection in others:
            connection.be_quiet(quiet=quiet)
