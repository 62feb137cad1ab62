"""Keeps the engine on the newest policy version: fetch, verify, pause, load, verify again, resume.

A version counts as served only after the engine's own checksums agree with what was sent. Until the first such version, and
after a failed update, the rollout does not serve: it takes no lease and generates nothing.

The rollout keeps a copy of the version that it fetched last (``replica``), so that the next one can be a delta.
``loading`` has how an engine gets it.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Literal

import structlog
import zmq.asyncio

from protocol.channels import WEIGHTS
from protocol.messages import Loaded, Manifest
from protocol.messages.base import shortened
from services.rollout.metrics import RolloutMetrics
from services.rollout.sglang import Engine, EngineError
from services.rollout.weights.fetch import DamagedError, FetchError, fetch_newest, newest_snapshot
from services.rollout.weights.loading import EngineLoader, VerificationError
from services.rollout.weights.peers import WeightPeers
from services.rollout.weights.process_group import GroupError, ReceivingGroup
from services.rollout.weights.replica import Replica
from services.rollout.weights.verify import Verifier
from services.runtime.clock import Clock
from services.runtime.errors import EndpointError, ServiceError
from services.runtime.net import PLAINTEXT, PeerClient, Security
from services.weights import Hash

log = structlog.get_logger()

RETRY_S: Final = 1.0
MAX_FAILED_LOADS: Final = 3
CONNECT_S: Final = 10.0


class WeightSync:
    """Follows the announced version.

    produces:     ``policy_version``, the verified version that the engine serves (0: none yet)
    waits for:    ``announce``; the weight server; the engine
    unblocked by: the broker's Pulse, which repeats the newest version about every second
    """

    def __init__(
        self,
        *,
        context: zmq.asyncio.Context,
        engine: Engine,
        work_directory: Path,
        pause_mode: Literal["retract", "in_place"],
        peer: str,
        session: str,
        clock: Clock,
        metrics: RolloutMetrics,
        retry_s: float = RETRY_S,
        security: Security = PLAINTEXT,
        weight_peers: WeightPeers | None = None,
        group: ReceivingGroup | None = None,
        kv_heads: int = 1,
    ) -> None:
        """``retry_s``: the pause before a fetch or a load is tried again. ``kv_heads``: of the model. ``weight_peers``:
        shares weights with other rollouts; None: the learner serves everything. ``group``: receives from the learner; if it
        fails, chunks are fetched.
        """
        self._context = context
        self._engine = engine
        self._verifier = Verifier(engine, kv_heads)
        self._work_directory = work_directory
        self._pause_mode = pause_mode
        self._peer = peer
        self._session = session
        self._clock = clock
        self._metrics = metrics
        self._retry_s = retry_s
        self._security = security
        self._on_change: Callable[[], None] = lambda: None
        self._weight_peers = weight_peers
        self._group = group
        self._replica = Replica(work_directory) if weight_peers is None else weight_peers.replica
        self._engine_hash: Hash | None = None
        self._loader = EngineLoader(engine, self._verifier, work_directory, metrics)
        self._announced = (0, "")
        self._wake = asyncio.Event()
        self._failed_loads = 0
        self._num_clients = 0
        self.policy_version = 0
        self.quarantined = ""
        self.loading = False
        self.may_generate = asyncio.Event()
        """Set while the engine serves a verified version and no update is under way."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """``callback`` is called when the served version changes, also to none."""
        self._on_change = callback

    def announce(self, policy_version: int, endpoint: str) -> None:
        """The broker says that ``policy_version`` can be fetched at ``endpoint``."""
        self._announced = (policy_version, endpoint)
        if policy_version > self.policy_version and endpoint:
            self._wake.set()

    async def run(self) -> None:
        """Follow until cancelled.

        Raises: ServiceError when updates keep failing: then the engine has to be restarted. EndpointError for a first
        version at an endpoint that this process cannot connect to.
        """
        await asyncio.to_thread(self._replica.restore)
        if self._weight_peers is None:
            await self._follow_announced()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._weight_peers.run(), name="weight_peers")
            await self._follow_announced()

    async def _follow_announced(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            version, endpoint = self._announced
            # The Pulse repeats a version while it is loaded: no connection is opened for what is served by now.
            if version > self.policy_version:
                try:
                    await self._follow(endpoint)
                except EndpointError as error:
                    if not self.policy_version:
                        raise
                    # Whatever it is told, a rollout that serves a version goes on with it.
                    self._on_not_fetched(endpoint, error)
                    await asyncio.sleep(self._retry_s)

    async def _follow(self, endpoint: str) -> None:
        """Load versions from one weight server until the newest is served or the server moved."""
        async with self._connected(endpoint) as client:
            while self._announced[1] == endpoint and self._announced[0] > self.policy_version:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await client.connected_welcome()
                    if await self._follow_in_group(client, endpoint):
                        continue
                    begin = self._clock.now()
                    weights = await fetch_newest(
                        client,
                        self.policy_version,
                        self._replica,
                        fetched=self._count,
                        sources=self._weight_peers,
                        engine_hash=await self._known_hash(),
                    )
                except (FetchError, TimeoutError) as error:
                    self._on_not_fetched(endpoint, error)
                    await asyncio.sleep(self._retry_s)
                    continue
                if weights is None:
                    await asyncio.sleep(self._retry_s)
                    continue
                self._metrics.weight_fetch_seconds.observe(self._clock.now() - begin)
                if await self._is_announced(weights.policy_version, endpoint):
                    await self._load(client, weights)

    async def _known_hash(self) -> Hash | None:
        """The hash whose checksums the learner shall send; None: of no use for shards, or the engine does not say it."""
        try:
            if self._engine_hash is None:
                self._engine_hash = await self._verifier.hash()
            return self._engine_hash if (await self._verifier.spread()).is_whole else None
        except (EngineError, ValueError) as error:
            # The load, which needs it, says so and counts it.
            log.info("engine_hash_unknown", error=str(error))
            return None

    def _on_not_fetched(self, endpoint: str, error: Exception) -> None:
        log.warning("weights_not_fetched", endpoint=endpoint, error=str(error) or "no handshake")
        self._metrics.weight_updates.labels(outcome="not_fetched").inc()
        self._metrics.weights_damaged.inc(isinstance(error, DamagedError))

    def _count(self, manifest: Manifest) -> None:
        self._metrics.weight_bytes.inc(manifest.num_bytes)
        self._metrics.weight_fetches.labels(kind=manifest.kind).inc()

    async def _is_announced(self, version: int, endpoint: str) -> bool:
        """Wait until the broker has announced a version as new as this one; False when it announces another.

        The learner serves a version a moment before the broker has committed it. If the learner dies in that moment the
        version never exists, and the broker would refuse its tokens.
        """
        waited = False
        while self._announced[1] == endpoint and self._announced[0] < version:
            waited = True
            self._wake.clear()
            await self._wake.wait()
        return not waited or self._announced == (version, endpoint)

    def _connected(self, endpoint: str) -> AbstractAsyncContextManager[PeerClient]:
        self._num_clients += 1
        return PeerClient(
            self._context,
            WEIGHTS,
            endpoint,
            role="rollout",
            peer=self._peer,
            session=self._session,
            clock=self._clock,
            security=self._security,
            number=self._num_clients,
        ).running("weights-client")

    async def _load(self, client: PeerClient, weights: Replica) -> None:
        version, digest = weights.policy_version, weights.digest
        if self._group is not None:
            self._group.forget_former()
        if self.policy_version == 0:
            weights.must_load_all()
        self.loading = True
        try:
            prepared = await self._loader.prepare(weights)
            self.may_generate.clear()
            begin = self._clock.now()
            await self._engine.pause(self._pause_mode)
            await self._loader.load(weights, prepared)
            self.policy_version, self.quarantined = version, ""
            await self._engine.resume()
            self.may_generate.set()
            pause_s = self._clock.now() - begin
        except (EngineError, VerificationError) as error:
            await self._on_failed(client, version, digest, str(error))
            return
        finally:
            self.loading = False
            await self._loader.tidy()
        await self._on_loaded(client, version, digest, pause_s)

    async def _follow_in_group(self, client: PeerClient, endpoint: str) -> bool:
        """Let the learner send its newest version to the engine; False: impossible now, so fetch the version."""
        group = self._group
        if group is None or not group.usable:
            return False
        manifest = await newest_snapshot(client)
        if manifest is None or manifest.policy_version <= self.policy_version:
            return False
        if not await self._is_announced(manifest.policy_version, endpoint):
            return True
        try:
            await group.join(client, manifest, endpoint)
        except (GroupError, EngineError) as error:
            await self._on_no_group(group, str(error))
            return False
        return await self._load_in_group(client, manifest, group)

    async def _load_in_group(self, client: PeerClient, manifest: Manifest, group: ReceivingGroup) -> bool:
        version, digest = manifest.policy_version, manifest.digest
        # The replica would no longer match the engine, and is no base for the versions that follow.
        self._replica.forget()
        self.loading = True
        self.may_generate.clear()
        begin = self._clock.now()
        try:
            await self._engine.pause(self._pause_mode)
            await group.load(client, manifest, self._pause_mode)
            EngineLoader.require(await group.verify())
            self.policy_version, self.quarantined = version, ""
            await self._engine.resume()
            self.may_generate.set()
            pause_s = self._clock.now() - begin
        except (EngineError, VerificationError) as error:
            await self._on_no_group(group, str(error))
            if not await self._goes_on(group):
                await self._on_failed(client, version, digest, str(error))
            return False
        finally:
            self.loading = False
        self._metrics.weight_fetches.labels(kind="group").inc()
        await self._on_loaded(client, version, digest, pause_s)
        return True

    async def _goes_on(self, group: ReceivingGroup) -> bool:
        """Generate on with the version that was served before the update, if nothing of the new one has arrived.

        So a learner that dies when it should send does not stop generation until it is back.
        """
        try:
            if not self.policy_version or not await group.holds_former():
                return False
            async with self._engine.updating(self.policy_version):
                pass  # The engine must say, too, that it serves that version.
            await self._engine.resume()
        except EngineError as error:
            log.warning("former_version_not_kept", policy_version=self.policy_version, error=str(error))
            return False
        self.may_generate.set()
        log.info("former_version_kept", policy_version=self.policy_version)
        return True

    async def _on_no_group(self, group: ReceivingGroup, error: str) -> None:
        log.warning("weights_group_failed", error=error)
        self._metrics.weight_updates.labels(outcome="no_group").inc()
        await group.failed()

    async def _on_loaded(self, client: PeerClient, version: int, digest: str, pause_s: float) -> None:
        self._failed_loads = 0
        self._metrics.policy_version.set(version)
        self._metrics.pause_seconds.observe(pause_s)
        self._metrics.weight_updates.labels(outcome="loaded").inc()
        log.info("weights_loaded", policy_version=version, pause_s=round(pause_s, 3))
        self._on_change()
        await client.send(Loaded(policy_version=version, digest=digest, pause_s=pause_s))

    async def _on_failed(self, client: PeerClient, version: int, digest: str, error: str) -> None:
        """The engine stays paused: weights in doubt generate nothing. The replica is fetched again, too."""
        self._engine_hash = None
        self._loader.doubt()
        self.may_generate.clear()
        self._replica.forget()
        self.policy_version, self.quarantined = 0, error
        self._failed_loads += 1
        self._metrics.policy_version.set(0)
        self._metrics.weight_updates.labels(outcome="failed").inc()
        log.error("weights_not_loaded", policy_version=version, error=error, attempt=self._failed_loads)
        self._on_change()
        await client.send(Loaded(policy_version=version, digest=digest, error=shortened(error)))
        if self._failed_loads >= MAX_FAILED_LOADS:
            raise ServiceError(f"the engine did not take policy version {version}: {error}")
        await asyncio.sleep(self._retry_s)
