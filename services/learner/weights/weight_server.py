"""The weight channel's binding end: serves manifests and chunks of the versions that a rank has, or of its parts."""

import asyncio
from contextlib import aclosing
from typing import Final

import structlog
from msgspec import structs

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.codec import Array
from gspo_protocol.messages import (
    Loaded,
    Manifest,
    ManifestRequest,
    Message,
    PartReady,
    PartRequest,
    Source,
    WeightRequest,
)
from gspo_protocol.sessions import first_identity, shown_identity
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.adapter_copy import PublishedBase
from gspo_services.learner.weights.fan_out import FanOut
from gspo_services.learner.weights.other_ranks import OtherRanks
from gspo_services.learner.weights.snapshot import SnapshotStore
from gspo_services.shared.net import Incoming, RouterChannel
from gspo_services.shared.weights import ChunkServer, Parts

log = structlog.get_logger()

MAX_RELAYS: Final = 256
"""Requests for parts of other ranks that wait; a later one is dropped, and its sender asks again."""


class WeightServer(ChunkServer):
    """Serves what the store holds; refers late requests to rollouts that have it (gspo_services.learner.weights.fan_out)."""

    def __init__(
        self,
        channel: RouterChannel,
        store: SnapshotStore,
        metrics: LearnerMetrics,
        fan_out: FanOut | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        """``fan_out``: None: one with the default limits. ``others``: of rank 0, which passes their parts on to rollouts
        that do not reach them; None: there are none."""
        super().__init__(
            channel, WEIGHTS, refused=metrics.messages_refused.labels(channel="weights").inc, sent=self._count_sent
        )
        self.bytes_sent = 0
        self._store = store
        self._metrics = metrics
        self._fan_out = FanOut() if fan_out is None else fan_out
        self._num_failed = self._fan_out.num_failed
        self._base: PublishedBase | None = None
        self._others = others
        self._tasks: asyncio.TaskGroup | None = None
        self._num_relays = 0
        self._ready: tuple[PartReady, dict[str, Array]] | None = None
        """What rank 0 is to hear of this rank's part of the newest version."""
        self._asked: dict[bytes, int] = {}
        """The version of which each sender wants to hear."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            await super().run()

    def keep_base(self, base: PublishedBase) -> None:
        """Adapters are served from now on, above this model."""
        self._base = base

    async def part_is_ready(self, ready: PartReady, arrays: dict[str, Array]) -> None:
        """Tell rank 0 of this rank's part, now or when it asks."""
        self._ready = (ready, arrays)
        for peer in [peer for peer, version in self._asked.items() if version == ready.policy_version]:
            await self._tell(peer)

    @property
    def newest_version(self) -> int:
        newest = self._store.newest
        return newest.policy_version if newest else 0

    def manifest_for(self, incoming: Incoming, request: ManifestRequest) -> Manifest | None:
        manifest = self._store.manifest_for(request.have_version)
        if manifest is not None and manifest.adapter is not None and request.hash and self._base is not None:
            manifest = structs.replace(manifest, checksums=self._base.checksums(request.hash))
        if manifest is None or manifest.policy_version <= request.have_version:
            return manifest
        source = Source(request.endpoint, incoming.key.decode()) if request.endpoint else None
        self._store.fetches(first_identity(incoming.peer), manifest.policy_version)
        item = (manifest.policy_version, manifest.base_version)
        sources = self._fan_out.join(item, first_identity(incoming.peer), source, direct=request.direct)
        self._count_failed()
        return structs.replace(manifest, sources=sources) if sources else manifest

    def parts(self, incoming: Incoming, request: WeightRequest) -> Parts | None:
        self._fan_out.came_back((request.policy_version, request.base_version), first_identity(incoming.peer))
        self._count_failed()
        parts = self._store.get(request.policy_version, request.base_version)
        if self._ready is not None and parts is not None and not request.base_version:
            # Only rank 0 hears which version a rollout begins to fetch, and that it has it.
            self._note_fetch(incoming, request, parts)
        return parts

    def _note_fetch(self, incoming: Incoming, request: WeightRequest, parts: Parts) -> None:
        peer = first_identity(incoming.peer)
        if request.first_chunk + request.num_chunks < parts.num_chunks:
            self._store.fetches(peer, request.policy_version)
        else:
            self._store.has_fetched(peer)

    def _count_sent(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        self._metrics.weight_bytes_sent.inc(num_bytes)

    def _count_failed(self) -> None:
        self._metrics.weight_sources_failed.inc(self._fan_out.num_failed - self._num_failed)
        self._num_failed = self._fan_out.num_failed

    async def send_chunks(self, incoming: Incoming, request: WeightRequest) -> None:
        if not request.part or self._others is None:
            await super().send_chunks(incoming, request)
        elif self._num_relays < MAX_RELAYS and self._tasks is not None:
            self._num_relays += 1
            self._tasks.create_task(self._relay(incoming.peer, request, self._others), name="relay")

    async def _relay(self, peer: bytes, request: WeightRequest, others: OtherRanks) -> None:
        """Pass on what another rank sends; if it sends nothing, the rollout asks again."""
        try:
            async with aclosing(others.chunks(request)) as answers:
                async for message, arrays in answers:
                    if not await self._channel.send(peer, message, arrays):
                        return
                    self._sent(sum(array.nbytes for array in arrays.values()))
        finally:
            self._num_relays -= 1

    async def on_other(self, incoming: Incoming, message: Message) -> bool:
        if not isinstance(message, PartRequest):
            return False
        self._asked = {incoming.peer: message.policy_version}
        if self._ready is not None and self._ready[0].policy_version == message.policy_version:
            await self._tell(incoming.peer)
        return True

    async def _tell(self, peer: bytes) -> None:
        assert self._ready is not None
        await self._channel.send(peer, *self._ready)

    def on_loaded(self, incoming: Incoming, loaded: Loaded) -> None:
        name = shown_identity(incoming.peer)
        self._store.has_fetched(first_identity(incoming.peer))
        if loaded.error:
            self._metrics.weight_loads_failed.inc()
            log.error("weights_not_loaded", peer=name, policy_version=loaded.policy_version, error=loaded.error)
        else:
            self._metrics.weight_loads.inc()
            log.info("weights_loaded", peer=name, policy_version=loaded.policy_version, pause_s=round(loaded.pause_s, 3))
