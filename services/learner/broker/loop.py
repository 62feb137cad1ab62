"""Rank 0's sockets in one event loop: the batch channel here, the weight server beside it.

No threads here: ``BrokerThread`` runs it in a separate thread, beside the training thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import zmq.asyncio

from gspo_protocol.channels import BATCH
from gspo_protocol.messages import (
    Batch,
    BatchFailed,
    BatchPart,
    BatchPending,
    BatchRequest,
    EndOfRun,
    Evaluated,
    Heartbeat,
    LedgerCommit,
    Resume,
    SkipBatch,
    Trained,
    Welcome,
)
from gspo_services.learner.broker.exchange import BatchExchange
from gspo_services.learner.broker.parts import DamagedPart
from gspo_services.learner.broker.port import Answer, Publication, ToBroker, updated_scores
from gspo_services.learner.broker.publisher import Publisher
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.net import Delivered, PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings, run_fingerprint

REQUEST_INTERVAL_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
MAX_ANNOUNCEMENTS: Final = 4
"""A publication and the report of its batch, with room to spare."""
KnownCommit = Callable[[], LedgerCommit | None]
"""The newest commit of the broker's ledger that a learner of this run was told of."""


class BrokerLoop:
    """Sends and receives what ``BrokerPort`` promises. Its coroutines run in the event loop that it was made in; its
    properties may be read from any thread.

    A task sends publications and reports while training continues, in the order in which they were handed over. One
    publication is under way at a time.

    produces:     batches, part by part, and ends of run, in order of request, given to ``arrived``; Published, then Trained
    waits for:    the broker; digests and deltas; for further parts until the training thread takes those that came
    unblocked by: Batch, BatchPart, SkipBatch, EndOfRun; ``part_taken``; acknowledgements
    """

    def __init__(
        self,
        settings: Settings,
        context: zmq.asyncio.Context,
        *,
        session: str,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        arrived: Callable[[Answer], None],
        request_interval_s: float = REQUEST_INTERVAL_S,
        known: KnownCommit = lambda: None,
    ) -> None:
        """Bind and connect. ``request_interval_s``: time between repetitions of an unanswered request. ``known``: what a
        former life was told.

        Raises: EndpointError; ConfigurationError when keys cannot be used.
        """
        security = Security.load(settings.security, "learner")
        self._clock = clock
        self._health = health
        self._arrived = arrived
        self._request_interval_s = request_interval_s
        self._publisher = Publisher(settings, context, security=security, clock=clock, metrics=metrics)
        self.endpoint: Final = settings.broker.batch_endpoint
        self._client = PeerClient(
            context, BATCH, self.endpoint,
            role="learner", peer="learner", session=session, clock=clock, fingerprint=run_fingerprint(settings),
            security=security, known=known,
        )  # fmt: skip
        self._exchange = BatchExchange()
        self._resume: Resume | None = None
        """Sent after each new handshake."""
        self._handshakes_seen = 0
        self._announcements: asyncio.Queue[tuple[Publication, float] | Trained] = asyncio.Queue(MAX_ANNOUNCEMENTS)
        """Each version with the time at which it was handed over."""
        self._unacknowledged: deque[tuple[int, int]] = deque()
        """For each report sent: the number of acknowledged messages that includes it; the next batch."""
        self._acknowledged_batches = 0
        self._pending = ""
        """What the broker waits for, in its words; empty: unknown."""
        self.scores: Mapping[int, float | None] = {}
        """See ``BrokerPort``. Replaced, never changed: the training thread reads it."""

    @property
    def commit(self) -> LedgerCommit | None:
        """See ``BrokerPort``."""
        return self._client.commit

    @property
    def encoding(self) -> bool:
        """Whether digests or a delta are being computed."""
        return self._publisher.encoding

    @property
    def reason_to_wait(self) -> str:
        """See ``BrokerPort``."""
        if self._client.refused:
            return self._client.refused
        if not self._client.connected:
            return f"no answer from the broker at {self.endpoint}"
        return self._pending or "the broker"

    async def run(self, started: Callable[[], None]) -> None:
        """Run the connections until cancelled; ``started`` is called once they run. Raises: ServiceError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._publisher.start(tasks)
                tasks.create_task(self._client.run(), name="batch-client")
                tasks.create_task(self._receive(), name="receive")
                tasks.create_task(self._announce(), name="announce")
                tasks.create_task(self._repeat(), name="repeat")
                tasks.create_task(self._beat(), name="heartbeat")
                started()
        finally:
            # Also when a task never began: each socket has a monitor, which must be read or closed.
            self._publisher.close()
            self._client.close()

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        """Wait for the Welcome."""
        return await self._client.connected_welcome()

    async def send(self, message: ToBroker) -> None:
        """See ``BrokerPort.tell``."""
        if isinstance(message, Trained):
            await self._announcements.put(message)
            return
        if isinstance(message, BatchRequest):
            self._exchange.want(message)
        elif not isinstance(message, BatchFailed):
            self._resume = Resume(next_batch=message.next_batch)
        await self._client.send(message)

    async def publish(self, publication: Publication) -> None:
        """See ``BrokerPort``. One publication is under way at a time: a second one waits here for the first."""
        await self.announced()
        await self._announcements.put((publication, self._clock.now()))

    async def announced(self) -> None:
        """Wait until everything that was handed over has been sent: then no copy of weights is kept any more."""
        await self._announcements.join()

    async def know_ranks(self, endpoints: Sequence[str]) -> None:
        """See ``BrokerThread``."""
        self._publisher.know_ranks(endpoints)

    async def has_room(self) -> None:
        """See ``BrokerPort.wait_for_room``."""
        await self.announced()
        self._publisher.make_room()

    async def flushed(self) -> None:
        """Wait until everything is acknowledged."""
        await self.announced()
        await self._client.flushed()

    async def reported_batches(self) -> int:
        """Return the first batch whose report the broker has not acknowledged."""
        return self._count_acknowledged()

    def _count_acknowledged(self) -> int:
        while self._unacknowledged and self._unacknowledged[0][0] <= self._client.num_acknowledged:
            _, self._acknowledged_batches = self._unacknowledged.popleft()
        return self._acknowledged_batches

    async def _announce(self) -> None:
        """Send what was handed over, in order.

        produces:     Published, Trained
        waits for:    digests and deltas; credit
        unblocked by: worker threads; acknowledgements
        """
        while True:
            announcement = await self._announcements.get()
            if isinstance(announcement, Trained):
                await self._client.send(announcement)
                with_this = self._client.num_acknowledged + self._client.num_unacknowledged
                self._unacknowledged.append((with_this, announcement.index + 1))
                self._count_acknowledged()
            else:
                published = await self._publisher.serve(*announcement)
                del announcement  # The copy of the weights is not kept while the next one is waited for.
                await self._client.send(published)
            self._announcements.task_done()

    async def _beat(self) -> None:
        """Tell the broker that this learner lives, whatever its training thread does, so that it keeps the run."""
        while True:
            await self._client.send(Heartbeat(policy_version=self._publisher.policy_version, status="serving", leases=[]))
            await asyncio.sleep(HEARTBEAT_S)

    # --- received and repeated -----------------------------------------------------------------------------------------

    async def part_taken(self) -> None:
        """The training thread has taken a part: ask for one more."""
        self._exchange.took()
        await self._ask_for_parts()

    async def _repeat(self) -> None:
        while True:
            self._health.beat()
            # A person must see that the broker refuses this learner's key.
            if self._client.refused:
                self._health.not_ready(self._client.refused)
            await self._ask_again()
            self._exchange.look()
            await self._ask_for_parts()
            await asyncio.sleep(self._request_interval_s)

    async def _ask_again(self) -> None:
        """Repeat the request while it is not answered; after a new handshake the checkpoint's position goes first."""
        if self._exchange.wanted is not None and self._handshakes_seen == self._client.num_handshakes:
            await self._client.send(self._exchange.wanted)

    async def _ask_for_parts(self) -> None:
        request = self._exchange.request_for_parts()
        if request is not None:
            await self._client.send(request)

    async def _receive(self) -> None:
        while True:
            await self._on_message(await self._client.inbox.get())

    async def _on_message(self, delivered: Delivered) -> None:
        """Raises: ServiceError for parts that arrive damaged again and again."""
        message = delivered.message
        if isinstance(message, Batch | BatchPart | SkipBatch | EndOfRun):
            try:
                answer = self._exchange.hear(message, delivered.arrays)
            except DamagedPart as error:
                raise ServiceError(f"the broker at {self.endpoint}: {error}") from error
            if answer is not None:
                self._arrived(answer)
            await self._ask_for_parts()
        elif isinstance(message, BatchPending):
            self._pending = f"{message.groups_ready} of {message.groups_needed} groups; {message.waiting_for}"
        elif isinstance(message, Evaluated):
            self.scores = updated_scores(self.scores, message)
        elif isinstance(message, Welcome):
            await self._on_welcome()

    async def _on_welcome(self) -> None:
        if self._resume is not None:
            await self._client.send(self._resume)
        self._handshakes_seen += 1
        await self._ask_again()
        self._exchange.ask_again()
        await self._ask_for_parts()
