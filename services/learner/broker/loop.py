"""The learner's sockets in one event loop: the batch channel and the weight server.

No threads here: ``BrokerThread`` runs it in a thread of its own, beside the training thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import zmq.asyncio

from protocol.channels import BATCH, WEIGHTS
from protocol.codec import Array
from protocol.messages import (
    Batch,
    BatchFailed,
    BatchPart,
    BatchPending,
    BatchRequest,
    EndOfRun,
    Evaluated,
    Heartbeat,
    Message,
    Published,
    Resume,
    SkipBatch,
    Trained,
    Welcome,
)
from services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from services.learner.broker.parts import DamagedPart, PartStream
from services.learner.broker.port import ToBroker
from services.learner.broker.scores import updated_scores
from services.learner.metrics import LearnerMetrics
from services.learner.weights import (
    AdapterCopy,
    PublishedChecksums,
    SnapshotStore,
    WeightCopy,
    WeightServer,
    build_snapshot,
    encode_delta,
    likely_hash,
)
from services.runtime.clock import Clock
from services.runtime.errors import ServiceError
from services.runtime.net import Authenticator, Delivered, PeerClient, RouterChannel, Security
from services.runtime.settings import Settings, run_fingerprint
from services.runtime.telemetry import Health

log = structlog.get_logger()

REQUEST_INTERVAL_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
MAX_ANNOUNCEMENTS: Final = 4
"""A publication and the report of its batch, with room to spare."""


@dataclass(frozen=True, kw_only=True)
class _Publication:
    policy_version: int
    weights: WeightCopy
    trained_batches: int
    vocabulary: int
    note_digest: Callable[[str], None]
    copied_at: float


class BrokerLoop:
    """Sends and receives what ``BrokerPort`` promises. Its methods are called in the event loop that it was made in.

    A task sends publications and reports while training continues, in the order in which they were handed over. One
    publication is under way at a time.

    produces:     batches, part by part, and ends of run, in order of request, given to ``arrived``; Published, then Trained
    waits for:    the broker; the rollouts' requests for weights; digests and deltas, made in worker threads; for further
                  parts until the training thread takes those that came
    unblocked by: Batch, BatchPart, EndOfRun; ``part_taken``; acknowledgements
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
    ) -> None:
        """Bind and connect. ``request_interval_s``: time between repetitions of an unanswered request.

        Raises: EndpointError; ConfigurationError when keys cannot be used.
        """
        security = Security.load(settings.security, "learner")
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._arrived = arrived
        self._request_interval_s = request_interval_s
        self._store = SnapshotStore()
        self._wanted: BatchRequest | None = None
        self._parts: PartStream | None = None
        """Of the batch that is under way."""
        self._resume: Resume | None = None
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, settings.learner.weights_endpoint, self._authenticator)
        self._weights_endpoint = settings.learner.advertised_weights_endpoint or channel.endpoint
        self._checksums = PublishedChecksums([likely_hash()])
        self._server = WeightServer(channel, self._store, metrics, checksums=self._checksums)
        self._client = PeerClient(
            context,
            BATCH,
            settings.broker.batch_endpoint,
            role="learner",
            peer="learner",
            session=session,
            clock=clock,
            fingerprint=run_fingerprint(settings),
            security=security,
        )
        self._pending = "the broker"
        self.encoding = False
        """Digests and a delta are being computed: that takes time, whatever the broker does."""
        self._policy_version = 0
        self._handshakes_seen = 0
        self._announcements: asyncio.Queue[_Publication | Trained] = asyncio.Queue(MAX_ANNOUNCEMENTS)
        self._unacknowledged: deque[tuple[int, int]] = deque()
        """For each report sent: how many messages are acknowledged once the broker has the report; the next batch."""
        self._acknowledged_batches = 0
        self.scores: Mapping[int, float | None] = {}
        """See ``BrokerPort``. Replaced, never changed: the training thread reads it."""

    @property
    def endpoint(self) -> str:
        """The broker's address."""
        return self._client.endpoint

    @property
    def reason_to_wait(self) -> str:
        """See ``BrokerPort``."""
        if self._client.refused:
            return self._client.refused
        return self._pending if self._client.connected else f"no answer from the broker at {self.endpoint}"

    async def run(self, started: Callable[[], None]) -> None:
        """Run the connections until cancelled; ``started`` is called once they run. Raises: ServiceError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._authenticator.run(), name="authenticator")
                tasks.create_task(self._server.run(), name="weight-server")
                tasks.create_task(self._client.run(), name="batch-client")
                tasks.create_task(self._receive(), name="receive")
                tasks.create_task(self._announce(), name="announce")
                tasks.create_task(self._repeat(), name="repeat")
                tasks.create_task(self._beat(), name="heartbeat")
                started()
        finally:
            # Also when a task never began: each socket has a monitor, which must be read or closed.
            self._authenticator.close()
            self._client.close()

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        """Wait for the broker's Welcome."""
        return await self._client.connected_welcome()

    async def tell(self, message: ToBroker) -> None:
        """See ``BrokerPort``."""
        if isinstance(message, Trained):
            await self._announcements.put(message)
            return
        if isinstance(message, BatchRequest):
            self._wanted, self._parts = message, None
        elif not isinstance(message, BatchFailed):
            self._resume = Resume(next_batch=message.next_batch)
        await self._client.send(message)

    async def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
    ) -> None:
        """See ``BrokerPort``. One publication is under way at a time: a second one waits here for the first."""
        await self.announced()
        publication = _Publication(
            policy_version=policy_version,
            weights=weights,
            trained_batches=trained_batches,
            vocabulary=vocabulary,
            note_digest=note_digest,
            copied_at=self._clock.now(),
        )
        await self._announcements.put(publication)

    async def announced(self) -> None:
        """Wait until everything that was handed over has been sent: then no copy of weights is kept any more."""
        await self._announcements.join()

    async def acknowledged(self, next_batch: int) -> bool:
        """See ``BrokerPort``."""
        self._count_acknowledged()
        return self._acknowledged_batches >= next_batch

    async def flushed(self) -> None:
        """Wait until the broker has acknowledged everything."""
        await self.announced()
        await self._client.flushed()

    async def _announce(self) -> None:
        """Send what was handed over, in order.

        produces:     Published, Trained
        waits for:    digests and deltas; credit
        unblocked by: worker threads; acknowledgements
        """
        while True:
            announcement = await self._announcements.get()
            message = await self._publication(announcement) if isinstance(announcement, _Publication) else announcement
            del announcement  # The copy of the weights is not kept while the next one is waited for.
            await self._client.send(message)
            if isinstance(message, Trained):
                with_this = self._client.num_acknowledged + self._client.num_unacknowledged
                self._unacknowledged.append((with_this, message.index + 1))
            self._count_acknowledged()
            self._announcements.task_done()

    async def _publication(self, publication: _Publication) -> Published:
        """Serve a version, as a snapshot and as a delta."""
        newest = self._store.newest
        # Not in the loop: rollouts fetch the former version meanwhile.
        self.encoding = True
        weights = publication.weights
        snapshot = await asyncio.to_thread(build_snapshot, publication.policy_version, weights)
        delta = None
        if isinstance(weights, AdapterCopy):
            # It is small, and changes everywhere. Engines report checksums of the model below it.
            self._checksums.keep_base(weights.base)
        else:
            delta = None if newest is None else await asyncio.to_thread(encode_delta, newest, snapshot)
            await asyncio.to_thread(self._checksums.renew, newest, snapshot)
        self.encoding = False
        await asyncio.to_thread(publication.note_digest, snapshot.manifest.digest)
        self._store.add(snapshot, delta)
        self._policy_version = snapshot.policy_version
        self._metrics.policy_version.set(snapshot.policy_version)
        self._metrics.announce_seconds.observe(self._clock.now() - publication.copied_at)
        log.info(
            "published",
            policy_version=snapshot.policy_version,
            num_bytes=snapshot.manifest.num_bytes,
            digest=snapshot.manifest.digest,
        )
        return Published(
            policy_version=snapshot.policy_version,
            endpoint=self._weights_endpoint,
            digest=snapshot.manifest.digest,
            num_bytes=snapshot.manifest.num_bytes,
            trained_batches=publication.trained_batches,
            vocabulary=publication.vocabulary,
        )

    def _count_acknowledged(self) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= self._client.num_acknowledged:
            _, self._acknowledged_batches = self._unacknowledged.popleft()

    # --- received ------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            delivered = await self._client.inbox.get()
            await self._on_message(delivered)

    async def _on_message(self, delivered: Delivered) -> None:
        message = delivered.message
        wanted = self._wanted
        if isinstance(message, Batch | SkipBatch | EndOfRun) and wanted is not None and message.index == wanted.index:
            self._wanted = None
            if isinstance(message, Batch):
                self._parts = PartStream(message)
                self._arrived(BatchAnnounced(batch=message, arrays=delivered.arrays))
                await self._ask_for_parts()
            else:
                self._arrived(message)
        elif isinstance(message, BatchPart):
            await self._on_part(message, delivered.arrays)
        elif isinstance(message, SkipBatch) and self._parts is not None and message.index == self._parts.index:
            self._parts = None  # Some part of it cannot be read.
            self._arrived(message)
        elif isinstance(message, BatchPending):
            self._pending = f"{message.groups_ready} of {message.groups_needed} groups; {message.waiting_for}"
        elif isinstance(message, Evaluated):
            self.scores = updated_scores(self.scores, message)
        elif isinstance(message, Welcome):
            if self._resume is not None:
                await self._client.send(self._resume)
            self._handshakes_seen += 1
            await self._ask_again()
            if self._parts is not None:
                self._parts.ask_again()
                await self._ask_for_parts()

    async def _on_part(self, part: BatchPart, arrays: dict[str, Array]) -> None:
        parts = self._parts
        if parts is None:
            return  # of a batch that is complete, or to be skipped
        try:
            is_next = parts.offer(part, arrays)
        except DamagedPart as error:
            raise ServiceError(f"the broker at {self.endpoint}: {error}") from error
        if is_next:
            self._arrived(PartArrived(part=part, arrays=arrays))
            if parts.complete:
                self._parts = None
                return
        await self._ask_for_parts()

    async def part_taken(self) -> None:
        """The training thread has taken a part: ask for one more."""
        if self._parts is not None:
            self._parts.took()
            await self._ask_for_parts()

    async def _ask_for_parts(self) -> None:
        request = None if self._parts is None else self._parts.request()
        if request is not None:
            await self._client.send(request)

    async def _repeat(self) -> None:
        part = None
        while True:
            self._health.beat()
            await self._ask_again()
            waits_for = None if self._parts is None else (self._parts.index, self._parts.next_part)
            # Not while parts come: each would be sent twice.
            if self._parts is not None and waits_for == part:
                self._parts.ask_again()
                await self._ask_for_parts()
            part = waits_for
            await asyncio.sleep(self._request_interval_s)

    async def _beat(self) -> None:
        """Tell the broker that this learner lives, whatever its training thread does, so that it keeps the run."""
        while True:
            await self._client.send(Heartbeat(policy_version=self._policy_version, status="serving", leases=[]))
            await asyncio.sleep(HEARTBEAT_S)

    async def _ask_again(self) -> None:
        # A person must see that the broker refuses this learner's key.
        if self._client.refused:
            self._health.not_ready(self._client.refused)
        wanted: Message | None = self._wanted
        # After a new handshake the broker hears the checkpoint's position first.
        if wanted is not None and self._handshakes_seen == self._client.num_handshakes:
            await self._client.send(wanted)
