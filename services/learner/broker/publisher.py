"""Serves one rank's part of the learner's versions to rollouts; on rank 0 the versions: what is announced can be fetched."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.codec import Array
from gspo_protocol.deltas import CHANGES_DIGEST_BYTES
from gspo_protocol.messages import PartReady, Published
from gspo_services.learner.broker.port import Publication
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights import (
    AdapterCopy,
    Delta,
    EncodedBucket,
    OtherRanks,
    Snapshot,
    SnapshotStore,
    WeightCopy,
    WeightServer,
    composed,
    encode_changes,
    part_delta,
    part_snapshot,
)
from gspo_services.shared.net import Authenticator, Delivered, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.settings import EVERY_ADDRESS, Settings, is_private

log = structlog.get_logger()

KEPT_DELTAS: Final = 4.0
"""A rank keeps deltas up to this share of its part: rank 0, which says what there is, forgets each of them sooner."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a rank has made of its part of a version before anybody can fetch it."""

    weights: WeightCopy
    base: Snapshot | None
    """The version before it; None: there was none."""
    buckets: list[EncodedBucket] | None
    """Its changes since then; None: more than values differ, or a delta would not pay off."""


class PartPublisher:
    """The weight server of one rank, and the versions that it has.

    produces:     weights, to rollouts that ask for them
    waits for:    the rollouts' requests; sums and changes, made in worker threads
    unblocked by: ManifestRequest, WeightRequest, PartRequest; ``prepare``
    """

    def __init__(
        self,
        settings: Settings,
        context: zmq.asyncio.Context,
        *,
        security: Security,
        clock: Clock,
        metrics: LearnerMetrics,
        rank: int = 0,
        local_rank: int = 0,
    ) -> None:
        """Bind. Raises: EndpointError; ConfigurationError when keys cannot be used."""
        self._clock = clock
        self._metrics = metrics
        self._store = SnapshotStore() if rank == 0 else SnapshotStore(delta_share=KEPT_DELTAS)
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        own = own_endpoint(settings.learner.weights_endpoint, local_rank)
        channel = RouterChannel(context, WEIGHTS, own, self._authenticator)
        self._others = OtherRanks(context, security=security, clock=clock) if rank == 0 else None
        self.endpoint: Final = channel.endpoint
        """Where it is bound."""
        self._advertised = settings.learner.advertised_weights_endpoint or self.endpoint
        self._server = WeightServer(channel, self._store, metrics, others=self._others)
        self.encoding = False
        """Sums and a delta are being computed: that takes time, whatever the broker does."""

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

    async def prepare(self, weights: WeightCopy) -> Prepared:
        """Sum this rank's part of a version, and encode what has changed in it."""
        # Not in the loop: rollouts fetch the earlier version meanwhile.
        self.encoding = True
        try:
            await asyncio.to_thread(weights.sums)
            base = self._store.newest
            # An adapter is small, and changes everywhere.
            buckets = None
            if base is not None and not isinstance(weights, AdapterCopy):
                buckets = await asyncio.to_thread(encode_changes, base.weights, weights)
            return Prepared(weights=weights, base=base, buckets=buckets)
        finally:
            self.encoding = False

    async def serve_part(self, publication: Publication) -> None:
        """Serve a part of a version, and tell rank 0."""
        prepared = await self.prepare(publication.weights)
        snapshot, delta, base_version = part_snapshot(publication.policy_version, prepared.weights), None, 0
        buckets = prepared.buckets or []
        if prepared.base is not None and prepared.buckets is not None:
            base_version = prepared.base.policy_version
            delta = part_delta(prepared.base, snapshot, b"".join(each.body for each in buckets))
        self._store.add(snapshot, delta)
        pieces, sums = prepared.weights.pieces, prepared.weights.sums()
        digests = b"".join(each.digest for each in buckets)
        arrays: dict[str, Array] = {
            "spans": np.array([(piece.begin, len(piece.data)) for piece in pieces], dtype=np.int64).reshape(-1, 2),
            "sums": np.concatenate(sums or [np.empty(0, dtype=np.uint64)]).view(np.int64),
            "digests": np.frombuffer(digests, dtype=np.uint8).reshape(-1, CHANGES_DIGEST_BYTES),
        }
        ready = PartReady(
            policy_version=publication.policy_version,
            base_version=base_version,
            buckets=[each.bucket for each in buckets],
            bytes_sent=self._server.bytes_sent,
        )
        await self._server.part_is_ready(ready, arrays)


class Publisher(PartPublisher):
    """The weight server of rank 0, and the versions that it has.

    produces:     weights, to rollouts that ask for them
    waits for:    the rollouts' requests; the other ranks' parts
    unblocked by: ManifestRequest, WeightRequest; PartReady; ``serve``
    """

    _others: OtherRanks

    policy_version = 0
    """The newest version that can be fetched."""
    _others_sent = 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Have ``tasks`` serve until they are cancelled."""
        super().start(tasks)
        self._tasks = tasks

    def know_ranks(self, endpoints: Sequence[str]) -> None:
        """Connect to the other ranks' weight servers. Raises: EndpointError."""
        self._others.connect(endpoints, self._tasks)

    async def serve(self, publication: Publication, copied_at: float) -> Published:
        """Serve a version, as a snapshot and as a delta. Returns its announcement. ``copied_at``: when the copy was made."""
        begun = self._clock.now()
        prepared = await self.prepare(publication.weights)
        encoded = self._clock.now()
        snapshot, delta = await self._composed(publication, prepared)
        if isinstance(publication.weights, AdapterCopy):
            # Engines report checksums of the model below it.
            self._server.keep_base(publication.weights.base)
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
            encode_s=round(encoded - begun, 3),
            ranks_s=round(self._clock.now() - encoded, 3),
        )
        return Published(
            policy_version=snapshot.policy_version,
            endpoint=self._advertised,
            digest=snapshot.manifest.digest,
            num_bytes=snapshot.manifest.num_bytes,
            trained_batches=publication.trained_batches,
            vocabulary=publication.vocabulary,
            experts=publication.experts,
        )

    async def _composed(self, publication: Publication, prepared: Prepared) -> tuple[Snapshot, Delta | None]:
        parts = await self._others.parts(publication.policy_version) if publication.is_part else []
        self._count_sent(parts)
        return await asyncio.to_thread(
            composed,
            publication.policy_version,
            prepared.weights,
            prepared.base,
            prepared.buckets,
            parts,
            self._others.endpoints if parts else (),
        )

    def _count_sent(self, parts: Sequence[Delivered]) -> None:
        """Of the other ranks, which export no metrics, up to this version."""
        sent = sum(each.message.bytes_sent for each in parts if isinstance(each.message, PartReady))
        self._metrics.weight_bytes_sent.inc(max(0, sent - self._others_sent))
        self._others_sent = max(sent, self._others_sent)


def own_endpoint(endpoint: str, local_rank: int) -> str:
    """Return where a rank of a machine is bound: rank 0 there at ``endpoint``, each other one a port further."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + local_rank}" if port.isdecimal() and int(port) and local_rank else endpoint


def reachable_endpoint(bound: str, *, advertised: str, towards: str) -> str:
    """Return where others find what a rank has bound at ``bound``: this machine's own address where that is every address.

    ``advertised``: where rank 0 is found. ``towards``: rank 0's host as the ranks call it; on a single machine it is known
    to nobody else, and the host of ``advertised`` is this one.
    """
    if not bound.startswith(EVERY_ADDRESS):
        return bound
    port = bound.rpartition(":")[2]
    if is_private(f"tcp://{towards}:{port}"):
        return f"{advertised.rpartition(':')[0]}:{port}"
    found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way_out:
        # Nothing is sent: the system only chooses its address.
        way_out.connect(address)
        own = way_out.getsockname()[0]
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"
