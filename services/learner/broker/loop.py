"""The learner's sockets in one event loop: the batch channel, and the weight server.

No threads here: ``BrokerThread`` runs it in a separate thread, beside the training thread.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import zmq.asyncio

from gspo_protocol.channels import BATCH, WEIGHTS
from gspo_protocol.messages import Heartbeat, LedgerCommit, Published, Trained, Welcome
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.broker.batches import Answer
from gspo_services.learner.broker.connection import BrokerConnection, Heard
from gspo_services.learner.broker.connections import MakeConnections
from gspo_services.learner.broker.one_connection import OneConnection
from gspo_services.learner.broker.port import ToBroker
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights import (
    AdapterCopy,
    PublishedChecksums,
    SnapshotMemory,
    SnapshotStore,
    WeightCopy,
    WeightServer,
    build_snapshot,
    encode_delta,
    hashing_device,
    likely_hash,
)
from gspo_services.shared.net import Authenticator, PeerClient, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings, run_fingerprint

log = structlog.get_logger()

REQUEST_INTERVAL_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
KnownCommit = Callable[[int], LedgerCommit | None]
"""The newest commit of a broker's ledger, by its number, that a learner of this run was told of."""
MAX_ANNOUNCEMENTS: Final = 4
"""A publication and the report of its batch, with room to spare."""


@dataclass(frozen=True, kw_only=True)
class _Publication:
    policy_version: int
    weights: WeightCopy
    trained_batches: int
    vocabulary: int
    note_digest: Callable[[str], None]
    experts: ModelExperts | None
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
        connections: MakeConnections = OneConnection,
        request_interval_s: float = REQUEST_INTERVAL_S,
        known: KnownCommit = lambda _: None,
    ) -> None:
        """Bind and connect. ``connections``: connects to the broker, or to several. ``request_interval_s``: time between
        repetitions of an unanswered request. ``known``: what a former life was told.

        Raises: EndpointError; ConfigurationError when keys cannot be used.
        """
        security = Security.load(settings.security, "learner")
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._request_interval_s = request_interval_s
        self._store = SnapshotStore()
        self._memory = SnapshotMemory()
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, settings.learner.weights_endpoint, self._authenticator)
        self._weights_endpoint = settings.learner.advertised_weights_endpoint or channel.endpoint
        self._checksums = PublishedChecksums([likely_hash()], device=hashing_device(shared=settings.run.colocate))
        self._server = WeightServer(channel, self._store, metrics, checksums=self._checksums)
        open_client = partial(_open_client, context, settings, session=session, clock=clock, security=security, known=known)
        self._connections = connections(
            settings, partial(_connection, open_client, settings.broker.batch_endpoints), arrived
        )
        self.encoding = False
        """Digests and a delta are being computed: that takes time, whatever the broker does."""
        self._policy_version = 0
        self._announcements: asyncio.Queue[_Publication | Sequence[Trained]] = asyncio.Queue(MAX_ANNOUNCEMENTS)

    @property
    def welcomes(self) -> Sequence[Welcome]:
        """See ``BrokerPort``."""
        return self._connections.welcomes

    @property
    def commits(self) -> Sequence[LedgerCommit | None]:
        """See ``BrokerPort``."""
        return self._connections.commits

    @property
    def scores(self) -> Mapping[int, float | None]:
        """See ``BrokerPort``."""
        return self._connections.scores

    @property
    def endpoint(self) -> str:
        """The address of the broker that acknowledges nothing, if one does not."""
        return self._connections.endpoint

    @property
    def reason_to_wait(self) -> str:
        """See ``BrokerPort``."""
        return self._connections.reason_to_wait

    async def run(self, started: Callable[[], None]) -> None:
        """Run the connections until cancelled; ``started`` is called once they run. Raises: ServiceError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._authenticator.run(), name="authenticator")
                tasks.create_task(self._server.run(), name="weight-server")
                tasks.create_task(self._announce(), name="announce")
                tasks.create_task(self._repeat(), name="repeat")
                tasks.create_task(self._beat(), name="heartbeat")
                tasks.create_task(self._connections.run(tasks), name="connect")
                started()
        finally:
            # Also when a task never began: each socket has a monitor, which must be read or closed.
            self._authenticator.close()
            self._connections.close()

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        """Wait for the Welcome."""
        return await self._connections.welcome()

    async def tell(self, message: ToBroker) -> None:
        """See ``BrokerPort``."""
        if isinstance(message, Trained):
            await self._announcements.put(self._connections.reports(message))
        else:
            await self._connections.tell(message)

    async def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
        experts: ModelExperts | None = None,
    ) -> None:
        """See ``BrokerPort``. One publication is under way at a time: a second one waits here for the first."""
        await self.announced()
        publication = _Publication(
            policy_version=policy_version,
            weights=weights,
            trained_batches=trained_batches,
            vocabulary=vocabulary,
            note_digest=note_digest,
            experts=experts,
            copied_at=self._clock.now(),
        )
        await self._announcements.put(publication)

    async def announced(self) -> None:
        """Wait until everything that was handed over has been sent: then no copy of weights is kept any more."""
        await self._announcements.join()

    async def has_room(self) -> None:
        """See ``BrokerPort.wait_for_room``."""
        await self.announced()
        self._store.make_room()

    async def acknowledged(self, next_batch: int) -> bool:
        """See ``BrokerPort``."""
        return self._connections.acknowledged(next_batch)

    async def flushed(self) -> None:
        """Wait until everything is acknowledged."""
        await self.announced()
        await self._connections.flushed()

    async def _announce(self) -> None:
        """Send what was handed over, in order.

        produces:     Published, Trained
        waits for:    digests and deltas; credit
        unblocked by: worker threads; acknowledgements
        """
        while True:
            announcement = await self._announcements.get()
            if isinstance(announcement, _Publication):
                published = await self._publication(announcement)
                del announcement  # The copy of the weights is not kept while the next one is waited for.
                await self._connections.announce(published)
            else:
                await self._connections.report(announcement)
            self._announcements.task_done()

    async def _publication(self, publication: _Publication) -> Published:
        """Serve a version, as a snapshot and as a delta."""
        newest = self._store.newest
        # Not in the loop: rollouts fetch the earlier version meanwhile.
        self.encoding = True
        weights = publication.weights
        # Copies that are freed leave room for a snapshot. Those in pinned memory stay, and so may a snapshot's memory.
        memory = self._memory if weights.from_device else None
        begun = self._clock.now()
        snapshot = await asyncio.to_thread(build_snapshot, publication.policy_version, weights, memory)
        copied = compared = self._clock.now()
        delta = None
        if isinstance(weights, AdapterCopy):
            # It is small, and changes everywhere. Engines report checksums of the model below it.
            self._checksums.keep_base(weights.base)
        else:
            delta = None if newest is None else await asyncio.to_thread(encode_delta, newest, snapshot)
            compared = self._clock.now()
            await asyncio.to_thread(self._checksums.renew, newest, snapshot)
        hashed = self._clock.now()
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
            snapshot_s=round(copied - begun, 3),
            delta_s=round(compared - copied, 3),
            checksums_s=round(hashed - compared, 3),
        )
        return Published(
            policy_version=snapshot.policy_version,
            endpoint=self._weights_endpoint,
            digest=snapshot.manifest.digest,
            num_bytes=snapshot.manifest.num_bytes,
            trained_batches=publication.trained_batches,
            vocabulary=publication.vocabulary,
            experts=publication.experts,
        )

    # --- received and repeated -----------------------------------------------------------------------------------------

    async def part_taken(self) -> None:
        """The training thread has taken a part: ask for one more."""
        await self._connections.part_taken()

    async def _repeat(self) -> None:
        while True:
            self._health.beat()
            await self._connections.repeat(self._health.not_ready)
            await asyncio.sleep(self._request_interval_s)

    async def _beat(self) -> None:
        """Tell the broker that this learner lives, whatever its training thread does, so that it keeps the run."""
        while True:
            await self._connections.beat(Heartbeat(policy_version=self._policy_version, status="serving", leases=[]))
            await asyncio.sleep(HEARTBEAT_S)


def _connection(
    open_client: Callable[[int, str], PeerClient], endpoints: Sequence[str], number: int, heard: Heard
) -> BrokerConnection:
    endpoint = endpoints[number]
    return BrokerConnection(number, endpoint, partial(open_client, number, endpoint), heard)


def _open_client(
    context: zmq.asyncio.Context,
    settings: Settings,
    number: int,
    endpoint: str,
    *,
    session: str,
    clock: Clock,
    security: Security,
    known: KnownCommit,
) -> PeerClient:
    return PeerClient(
        context,
        BATCH,
        endpoint,
        role="learner",
        peer="learner",
        session=session,
        clock=clock,
        fingerprint=run_fingerprint(settings),
        security=security,
        # Each connection has an identity of its own: a broker that two of them reach by mistake can answer both.
        number=number,
        expected=(number, settings.broker.num_brokers),
        known=partial(known, number),
    )
