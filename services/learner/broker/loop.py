"""The learner's sockets in one event loop: a batch channel to each broker, and the weight server.

No threads here: ``BrokerThread`` runs it in a thread of its own, beside the training thread.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import zmq.asyncio

from gspo_protocol.channels import BATCH, WEIGHTS
from gspo_protocol.messages import BatchFailed, BatchRequest, EndOfRun, Heartbeat, Published, Trained, Welcome
from gspo_services.learner.broker.batches import Answer, BatchAnnounced
from gspo_services.learner.broker.line import BrokerLine
from gspo_services.learner.broker.port import ToBroker
from gspo_services.learner.broker.round import BatchRound
from gspo_services.learner.broker.welcome import merged_welcome
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights import (
    AdapterCopy,
    PublishedChecksums,
    SnapshotStore,
    WeightCopy,
    WeightServer,
    build_snapshot,
    encode_delta,
    likely_hash,
)
from gspo_services.shared.net import Authenticator, PeerClient, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings, run_fingerprint

log = structlog.get_logger()

REQUEST_INTERVAL_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
WITHOUT_FIRST_S: Final = 5.0
"""Silence of broker 0 after which nothing is said to the others: by then it may give the run to another learner."""
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
    publication is under way at a time. Several brokers hear everything in their order, and broker 0's Welcome comes before
    the others are asked for theirs: whoever has broker 0 is the learner, so that no two have some brokers each.

    produces:     batches, part by part, and ends of run, in order of request, given to ``arrived``; Published, then Trained
    waits for:    every broker; the rollouts' requests for weights; digests and deltas, made in worker threads; for further
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
        self._num_batches = settings.run.num_batches
        self._store = SnapshotStore()
        self._round: BatchRound | None = None
        """Of the last request."""
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, settings.learner.weights_endpoint, self._authenticator)
        self._weights_endpoint = settings.learner.advertised_weights_endpoint or channel.endpoint
        self._checksums = PublishedChecksums([likely_hash()])
        self._server = WeightServer(channel, self._store, metrics, checksums=self._checksums)
        open_client = partial(_open_client, context, settings, session=session, clock=clock, security=security)
        self._lines = [
            BrokerLine(number, endpoint, partial(open_client, number, endpoint), self._heard)
            for number, endpoint in enumerate(settings.broker.batch_endpoints)
        ]
        self._lines[0].open()
        self.encoding = False
        """Digests and a delta are being computed: that takes time, whatever the broker does."""
        self._is_quiet = False
        self._policy_version = 0
        self.welcomes: Sequence[Welcome] = ()
        """See ``BrokerPort``."""
        self._announcements: asyncio.Queue[_Publication | Sequence[Trained]] = asyncio.Queue(MAX_ANNOUNCEMENTS)

    @property
    def scores(self) -> Mapping[int, float | None]:
        """See ``BrokerPort``: broker 0 evaluates."""
        return self._lines[0].scores

    @property
    def endpoint(self) -> str:
        """The address of the broker that acknowledges nothing, if one does not."""
        return next((line for line in self._lines if line.owes), self._lines[0]).endpoint

    @property
    def reason_to_wait(self) -> str:
        """See ``BrokerPort``."""
        line = min(self._lines, key=self._readiness)
        if line.refused:
            return self._said(line, line.refused)
        if not line.connected:
            return f"no answer from {self._name(line)} at {line.endpoint}"
        return self._said(line, line.pending) if line.pending else self._name(line)

    def _name(self, line: BrokerLine) -> str:
        return f"broker {line.number}" if len(self._lines) > 1 else "the broker"

    def _said(self, line: BrokerLine, text: str) -> str:
        return f"{self._name(line)}: {text}" if len(self._lines) > 1 else text

    def _readiness(self, line: BrokerLine) -> int:
        """The lower, the more it is this broker that is waited for."""
        if line.refused:
            return 0
        if not line.connected:
            return 1
        waits = self._round is not None and (self._round.waits_for(line.number) or self._round.turn == line.number)
        return 2 if waits else 3

    async def run(self, started: Callable[[], None]) -> None:
        """Run the connections until cancelled; ``started`` is called once they run. Raises: ServiceError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._authenticator.run(), name="authenticator")
                tasks.create_task(self._server.run(), name="weight-server")
                tasks.create_task(self._announce(), name="announce")
                tasks.create_task(self._repeat(), name="repeat")
                tasks.create_task(self._beat(), name="heartbeat")
                tasks.create_task(self._connect(tasks), name="connect")
                started()
        finally:
            # Also when a task never began: each socket has a monitor, which must be read or closed.
            self._authenticator.close()
            for line in self._lines:
                line.close()

    async def _connect(self, tasks: asyncio.TaskGroup) -> None:
        """Run the line to broker 0 and, once it has welcomed this learner, the lines to the others."""
        for line in self._lines:
            if line.number:
                await self._lines[0].welcome()
                # Only now: nobody reads the monitor of a line that does not run.
                line.open()
            tasks.create_task(line.run(), name=f"batch-client-{line.number}")
            tasks.create_task(line.receive(), name=f"receive-{line.number}")

    # --- sent ----------------------------------------------------------------------------------------------------------

    async def welcome(self) -> Welcome:
        """Wait for every broker's Welcome: what they say together."""
        # Those of the others are asked for after broker 0's.
        found = [await line.welcome() for line in self._lines]
        self.welcomes = found if len(found) > 1 else ()
        return merged_welcome(found)

    async def tell(self, message: ToBroker) -> None:
        """See ``BrokerPort``."""
        if isinstance(message, Trained):
            await self._announcements.put(self._reports(message))
            return
        if isinstance(message, BatchRequest):
            self._round = BatchRound(message.index, len(self._lines))
            for line in self._lines:
                line.want(message)
        elif not isinstance(message, BatchFailed):
            for line in self._lines:
                line.resume_at(message.next_batch)
        for line in self._lines:
            await line.send(message)

    def _reports(self, trained: Trained) -> Sequence[Trained]:
        if self._round is None or self._round.index != trained.index:
            return [trained] * len(self._lines)
        return self._round.reports(trained)

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
        return all(line.acknowledged_batches() >= next_batch for line in self._lines)

    async def flushed(self) -> None:
        """Wait until every broker has acknowledged everything."""
        await self.announced()
        for line in self._lines:
            await line.flushed()

    async def _announce(self) -> None:
        """Send what was handed over, in order.

        produces:     Published, Trained
        waits for:    digests and deltas; credit
        unblocked by: worker threads; acknowledgements
        """
        while True:
            announcement = await self._announcements.get()
            messages: Sequence[Published | Trained]
            if isinstance(announcement, _Publication):
                messages = [await self._publication(announcement)] * len(self._lines)
            else:
                messages = announcement
            del announcement  # The copy of the weights is not kept while the next one is waited for.
            for line, message in zip(self._lines, messages, strict=True):
                await line.announce(message)
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

    # --- received ------------------------------------------------------------------------------------------------------

    async def _heard(self, line: BrokerLine, answer: Answer) -> None:
        """A broker has answered the last request, or the next part of its share has come."""
        # A line is asked only in a round.
        assert self._round is not None
        begins_again = self._round.hear(line.number, answer)
        self._hand_over(self._round)
        if begins_again:
            again = [each for each in self._lines if isinstance(self._round.answer(each.number), BatchAnnounced)]
            # All of them at once: a part that comes meanwhile is not the first one.
            for each in again:
                each.begin_again()
            for each in again:
                await each.ask_for_parts()
        # At the end all brokers end by themselves, and broker 0 only after the last evaluation.
        if self._round.end is not None and self._round.index < self._num_batches:
            await self._stop_the_others(self._round, self._round.end)

    async def _stop_the_others(self, round_: BatchRound, end: EndOfRun) -> None:
        ended = next(line for line in self._lines if round_.answer(line.number) is end)
        for line in self._lines:
            if round_.waits_for(line.number):
                await line.stop(f"broker {ended.number} has ended the run: {end.reason}")

    async def part_taken(self) -> None:
        """The training thread has taken a part: ask for one more."""
        if self._round is None:
            return
        broker = self._round.took()
        self._hand_over(self._round)
        if broker is not None:
            await self._lines[broker].part_taken()

    def _hand_over(self, round_: BatchRound) -> None:
        try:
            ready = round_.ready()
        except ValueError as error:
            raise ServiceError(f"the brokers' shares of batch {round_.index} do not make one batch: {error}") from error
        for answer in ready:
            self._arrived(answer)

    async def _repeat(self) -> None:
        while True:
            self._health.beat()
            for line in self._lines:
                # A person must see that the broker refuses this learner's key.
                if line.refused:
                    self._health.not_ready(self._said(line, line.refused))
                await line.ask_again()
                await line.ask_for_silent_parts()
            await asyncio.sleep(self._request_interval_s)

    async def _beat(self) -> None:
        """Tell the brokers that this learner lives, whatever its training thread does, so that it keeps the run."""
        while True:
            self._follow_first()
            for line in self._lines:
                await line.send(Heartbeat(policy_version=self._policy_version, status="serving", leases=[]))
            await asyncio.sleep(HEARTBEAT_S)

    def _follow_first(self) -> None:
        """Who is cut off from broker 0 keeps no place at the others: another learner that broker 0 admits needs all."""
        first, *others = self._lines
        # At the end of a run broker 0 ends when it is done, and the others still have to hear of it.
        has_ended = self._round is not None and isinstance(self._round.answer(first.number), EndOfRun)
        quiet = first.silent_s > WITHOUT_FIRST_S and not has_ended
        if any(line.is_open for line in others) and quiet != self._is_quiet:
            self._is_quiet = quiet
            log.info("quiet_without_broker_0" if quiet else "broker_0_is_back", silent_s=round(first.silent_s, 1))
        for line in others:
            line.be_quiet(quiet=quiet)


def _open_client(
    context: zmq.asyncio.Context,
    settings: Settings,
    number: int,
    endpoint: str,
    *,
    session: str,
    clock: Clock,
    security: Security,
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
        # Each line has an identity of its own: a broker that two of them reach by mistake can answer both.
        number=number,
        expected=(number, settings.broker.num_brokers),
    )
