"""Weights between rollouts: this one serves its replica, and fetches from the rollouts that the learner names.

A rollout does not trust its peers: it checks their bytes against the learner's own manifest, like all others. When a peer's
bytes are damaged, slow or missing, the learner serves them instead.
"""

import asyncio
import statistics
from collections import deque
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import structlog
import zmq.asyncio

from gspo_protocol.channels import PEER_WEIGHTS
from gspo_protocol.messages import Loaded, Manifest, ManifestRequest, Source, WeightRequest
from gspo_protocol.sessions import session_towards, shown_identity
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.weights.chunks import FetchError, GoneError, fetch_chunks
from gspo_services.rollout.weights.replica import Landing, Replica
from gspo_services.shared.net import Authenticator, Incoming, KeyFileError, PeerClient, RouterChannel, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import EndpointError, ServiceError, flatten
from gspo_services.shared.weights import ChunkServer, Parts

log = structlog.get_logger()

KEEP_DELTAS: Final = 4
"""Deltas kept for rollouts that are a little behind."""
CONNECT_S: Final = 3.0
STALL_S: Final = 3.0
PATIENCE_S: Final = 3.0
"""How long to wait for a source that does not even fetch the version yet. There is no limit while it fetches it."""
POLL_S: Final = 0.05
PATIENCE_GROWTH: Final = 4.0
"""The second source may take this many times as long as the first: if all are slow, the learner would serve everybody."""
SLOW_SHARE: Final = 1 / 8
"""A source that delivers less than this share of the usual rate is dropped."""
NUM_RATES: Final = 9
MIN_RATES: Final = 3


class SlowError(FetchError):
    """A source is so slow that another one would be faster."""


class PeerWeightServer(ChunkServer):
    """Serves this rollout's replica to other rollouts."""

    def __init__(self, channel: RouterChannel, replica: Replica, metrics: RolloutMetrics) -> None:
        super().__init__(
            channel, PEER_WEIGHTS, refused=metrics.peer_messages_refused.inc, sent=metrics.weight_bytes_served.inc
        )
        self._replica = replica

    @property
    def newest_version(self) -> int:
        return self._replica.newest_version

    def manifest_for(self, incoming: Incoming, request: ManifestRequest) -> Manifest | None:
        """Always None: only the learner knows what is available."""
        return None

    def parts(self, incoming: Incoming, request: WeightRequest) -> Parts | None:
        return self._replica.parts(request.policy_version, request.base_version)

    def on_loaded(self, incoming: Incoming, loaded: Loaded) -> None:
        log.debug("loaded_elsewhere", peer=shown_identity(incoming.peer), policy_version=loaded.policy_version)


class WeightPeers:
    """This rollout's part in the distribution of weights.

    produces:     WeightChunk, WeightGone for other rollouts; the bytes of a manifest, from one of its sources
    waits for:    requests; a source that is still fetching
    unblocked by: the next request; the source's answers, CONNECT_S, STALL_S, PATIENCE_S
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        peer: str,
        session: str,
        clock: Clock,
        metrics: RolloutMetrics,
        security: Security,
        directory: Path | None = None,
        connect_s: float = CONNECT_S,
        patience_s: float = PATIENCE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """Bind ``endpoint``, which the learner also gives to other rollouts. ``directory``: of the replica's files. A source
        may take ``connect_s`` to welcome us, and may be silent for ``stall_s``; PATIENCE_S explains ``patience_s``.
        Raises: EndpointError; KeyFileError.
        """
        self.replica = Replica(directory, keep_deltas=KEEP_DELTAS)
        self._context = context
        self._peer = peer
        self._session = session
        self._clock = clock
        self._metrics = metrics
        self._security = security
        self._connect_s = connect_s
        self._patience_s = patience_s
        self._stall_s = stall_s
        self._authenticator = Authenticator(context, security, clock, metrics.authenticator_counters)
        self._server = PeerWeightServer(
            RouterChannel(context, PEER_WEIGHTS, endpoint, self._authenticator), self.replica, metrics
        )
        self._distrusts = False
        self._num_clients = 0
        # Bytes per second of the last fetches from other rollouts.
        self._rates: deque[float] = deque(maxlen=NUM_RATES)

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._authenticator.run(), name="peer-authenticator")
                tasks.create_task(self._server.run(), name="peer-weights")
        finally:
            self.close()

    def close(self) -> None:
        """Close, even if ``run`` never began. A second call does nothing."""
        self._authenticator.close()
        self._server.close()

    # --- where to fetch ------------------------------------------------------------------------------------------------

    def next_request(self) -> ManifestRequest:
        """Return the next request to the learner; the caller fills in the version of its replica."""
        direct, self._distrusts = self._distrusts, False
        return ManifestRequest(have_version=0, endpoint=self.endpoint, direct=direct)

    def were_wrong(self) -> None:
        """Fetch the next version from the learner itself."""
        self._metrics.weight_sources.labels(outcome="damaged").inc()
        self._distrusts = True

    async def fetch(self, manifest: Manifest, landing: Landing) -> bool:
        """Put the bytes of ``manifest`` into ``landing``, from the first of its sources that has them; False: none has."""
        patience = 1.0
        for source in manifest.sources:
            if source.endpoint != self.endpoint and await self._try(source, manifest, landing, patience):
                return True
            patience *= PATIENCE_GROWTH
        return False

    async def _try(self, source: Source, manifest: Manifest, landing: Landing, patience: float) -> bool:
        outcome = "fetched"
        reasons: list[str] = []
        try:
            await self._fetch_from(source, manifest, landing, patience)
        except* SlowError as group:
            outcome, reasons = "slow", [str(error) for error in flatten(group)]
        except* (FetchError, EndpointError, KeyFileError, ServiceError, TimeoutError) as group:
            outcome, reasons = "failed", [str(error) or "no handshake" for error in flatten(group)]
        if outcome != "fetched":
            log.warning("source_failed", source=source.endpoint, policy_version=manifest.policy_version, error=reasons)
        self._metrics.weight_sources.labels(outcome=outcome).inc()
        return outcome == "fetched"

    async def _fetch_from(self, source: Source, manifest: Manifest, landing: Landing, patience: float) -> None:
        """Connect, and wait until the source has the version.

        Raises: FetchError, EndpointError, KeyFileError, ServiceError, TimeoutError, alone or in a group.
        """
        async with self._connected(source) as client:
            async with asyncio.timeout(self._connect_s * patience):
                await client.connected_welcome()
            waited_s = 0.0
            while True:
                try:
                    await self._fetch_in_time(client, manifest, landing, patience)
                    return
                except GoneError as gone:
                    # The newest version may be one that the source is fetching, and will have soon.
                    is_coming = gone.newest_version == manifest.policy_version
                    if gone.newest_version > manifest.policy_version or (not is_coming and waited_s >= self._patience_s):
                        raise
                    waited_s += 0 if is_coming else POLL_S
                    await asyncio.sleep(POLL_S)

    async def _fetch_in_time(self, client: PeerClient, manifest: Manifest, landing: Landing, patience: float) -> None:
        """Fetch, at the usual rate or not much slower. Raises: FetchError; SlowError, its subclass."""
        limit_s = None
        if len(self._rates) >= MIN_RATES:
            usual = statistics.median(self._rates)
            limit_s = patience * max(self._stall_s, manifest.num_bytes / (SLOW_SHARE * usual))
        begin = self._clock.now()
        try:
            async with asyncio.timeout(limit_s):
                await fetch_chunks(client, manifest, landing, self._stall_s * patience, max_stalls=1)
        except TimeoutError as error:
            raise SlowError(
                f"version {manifest.policy_version}: {manifest.num_bytes} bytes did not come within {limit_s:.1f} s, "
                f"{1 / SLOW_SHARE:g} times as long as they usually take"
            ) from error
        self._rates.append(manifest.num_bytes / max(self._clock.now() - begin, 1e-6))

    def _connected(self, source: Source) -> AbstractAsyncContextManager[PeerClient]:
        self._num_clients += 1
        return PeerClient(
            self._context,
            PEER_WEIGHTS,
            source.endpoint,
            role="rollout",
            peer=self._peer,
            session=session_towards(self._session, source.endpoint),
            clock=self._clock,
            security=self._security.with_server("rollout", source.key),
            number=self._num_clients,
        ).running("peer-weights-client")
