"""Serves the learner's versions to rollouts: what is to be announced can be fetched."""

import asyncio

import structlog
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import Published
from gspo_services.learner.broker.port import Publication
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights import (
    AdapterCopy,
    SnapshotStore,
    WeightServer,
    build_snapshot,
    encode_delta,
)
from gspo_services.shared.net import Authenticator, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import Settings

log = structlog.get_logger()


class Publisher:
    """The weight server, and the versions that it has.

    produces:     weights, to rollouts that ask for them
    waits for:    the rollouts' requests; snapshots, deltas and digests, made in worker threads
    unblocked by: ManifestRequest, WeightRequest; ``serve``
    """

    def __init__(
        self,
        settings: Settings,
        context: zmq.asyncio.Context,
        *,
        security: Security,
        clock: Clock,
        metrics: LearnerMetrics,
    ) -> None:
        """Bind. Raises: EndpointError; ConfigurationError when keys cannot be used."""
        self._clock = clock
        self._metrics = metrics
        self._store = SnapshotStore()
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        channel = RouterChannel(context, WEIGHTS, settings.learner.weights_endpoint, self._authenticator)
        self._endpoint = settings.learner.advertised_weights_endpoint or channel.endpoint
        self._server = WeightServer(channel, self._store, metrics)
        self.encoding = False
        """Digests and a delta are being computed: that takes time, whatever the broker does."""
        self.policy_version = 0
        """The newest version that can be fetched."""

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Have ``tasks`` serve until they are cancelled."""
        tasks.create_task(self._authenticator.run(), name="authenticator")
        tasks.create_task(self._server.run(), name="weight-server")

    def close(self) -> None:
        """Also when nothing was started: a socket has a monitor, which must be read or closed."""
        self._authenticator.close()

    def make_room(self) -> None:
        """Let go of the oldest version that is served."""
        self._store.make_room()

    async def serve(self, publication: Publication, copied_at: float) -> Published:
        """Serve a version, as a snapshot and as a delta. Returns its announcement. ``copied_at``: when the copy was made."""
        newest = self._store.newest
        # Not in the loop: rollouts fetch the earlier version meanwhile.
        self.encoding = True
        weights = publication.weights
        begun = self._clock.now()
        snapshot = await asyncio.to_thread(build_snapshot, publication.policy_version, weights)
        copied = self._clock.now()
        delta = None
        if isinstance(weights, AdapterCopy):
            # It is small, and changes everywhere. Engines report checksums of the model below it.
            self._server.keep_base(weights.base)
        elif newest is not None:
            delta = await asyncio.to_thread(encode_delta, newest, snapshot)
        compared = self._clock.now()
        self.encoding = False
        await asyncio.to_thread(publication.note_digest, snapshot.manifest.digest)
        self._store.add(snapshot, delta)
        self.policy_version = snapshot.policy_version
        self._metrics.policy_version.set(snapshot.policy_version)
        self._metrics.announce_seconds.observe(self._clock.now() - copied_at)
        log.info(
            "published",
            policy_version=snapshot.policy_version,
            num_bytes=snapshot.manifest.num_bytes,
            digest=snapshot.manifest.digest,
            snapshot_s=round(copied - begun, 3),
            delta_s=round(compared - copied, 3),
        )
        return Published(
            policy_version=snapshot.policy_version,
            endpoint=self._endpoint,
            digest=snapshot.manifest.digest,
            num_bytes=snapshot.manifest.num_bytes,
            trained_batches=publication.trained_batches,
            vocabulary=publication.vocabulary,
            experts=publication.experts,
        )
