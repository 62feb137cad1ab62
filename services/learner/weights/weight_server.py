"""The weight channel's binding end: serves manifests and chunks of the versions that the learner holds."""

import structlog
from msgspec import structs

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import (
    Loaded,
    Manifest,
    ManifestRequest,
    Source,
    WeightRequest,
)
from gspo_protocol.sessions import first_identity, shown_identity
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.weights.adapter_copy import PublishedBase
from gspo_services.learner.weights.fan_out import FanOut
from gspo_services.learner.weights.snapshot import SnapshotStore
from gspo_services.shared.net import Incoming, RouterChannel
from gspo_services.shared.weights import ChunkServer, Parts

log = structlog.get_logger()


class WeightServer(ChunkServer):
    """Serves what the store holds; refers late requests to rollouts that have it (gspo_services.learner.weights.fan_out)."""

    def __init__(
        self,
        channel: RouterChannel,
        store: SnapshotStore,
        metrics: LearnerMetrics,
        fan_out: FanOut | None = None,
    ) -> None:
        """``fan_out``: None: one with the default limits."""
        super().__init__(
            channel,
            WEIGHTS,
            refused=metrics.messages_refused.labels(channel="weights").inc,
            sent=metrics.weight_bytes_sent.inc,
        )
        self._store = store
        self._metrics = metrics
        self._fan_out = FanOut() if fan_out is None else fan_out
        self._num_failed = self._fan_out.num_failed
        self._base: PublishedBase | None = None

    def keep_base(self, base: PublishedBase) -> None:
        """Adapters are served from now on, above this model."""
        self._base = base

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
        return self._store.get(request.policy_version, request.base_version)

    def _count_failed(self) -> None:
        self._metrics.weight_sources_failed.inc(self._fan_out.num_failed - self._num_failed)
        self._num_failed = self._fan_out.num_failed

    def on_loaded(self, incoming: Incoming, loaded: Loaded) -> None:
        name = shown_identity(incoming.peer)
        self._store.has_fetched(first_identity(incoming.peer))
        if loaded.error:
            self._metrics.weight_loads_failed.inc()
            log.error("weights_not_loaded", peer=name, policy_version=loaded.policy_version, error=loaded.error)
        else:
            self._metrics.weight_loads.inc()
            log.info("weights_loaded", peer=name, policy_version=loaded.policy_version, pause_s=round(loaded.pause_s, 3))
