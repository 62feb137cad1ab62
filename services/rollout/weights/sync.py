"""Keeps the engine on the newest policy version: fetch, verify, pause, load, verify again, resume.

A version counts as served only after the engine's own checksums agree with what was sent. Until the first such version, and
after a failed update, the rollout does not serve: it takes no lease and generates nothing.

The rollout keeps a copy of the version that it fetched last (``replica``), so that the next one can be a delta.
``loading`` has how an engine gets it.

Where learner and engine time-share a device, a version is fetched without the device and loaded with it. An engine that
gave the device up has lost its weights: it gets the served version again, from the copy, and is verified as with any other.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Literal

import structlog
import zmq.asyncio

from gspo_protocol.channels import WEIGHTS
from gspo_protocol.messages import Loaded, Manifest, Probe
from gspo_protocol.messages.base import shortened
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import Engine, EngineError
from gspo_services.rollout.weights.adapter_loader import AdapterLoader, AdapterPlan, BaseUnknownError
from gspo_services.rollout.weights.chunks import FetchError
from gspo_services.rollout.weights.colocate import EngineDevice
from gspo_services.rollout.weights.fetch import DamagedError, fetch_newest
from gspo_services.rollout.weights.loader import LOADED, EngineLoader, VerificationError
from gspo_services.rollout.weights.parts import RankConnections
from gspo_services.rollout.weights.peers import WeightPeers
from gspo_services.rollout.weights.probe import require_same_policy
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.verify import Verifier
from gspo_services.shared.net import PLAINTEXT, PeerClient, Security
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import EndpointError, ServiceError
from gspo_services.shared.weights import Hash

log = structlog.get_logger()

RETRY_S: Final = 1.0
MAX_FAILED_LOADS: Final = 3
MAX_FAILED_RELEASES: Final = 3
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
        kv_heads: int = 1,
        adapters: AdapterPlan | None = None,
        device: EngineDevice | None = None,
    ) -> None:
        """``retry_s``: the pause before a fetch or a load is tried again. ``kv_heads``: of the model. ``weight_peers``:
        shares weights with other rollouts; None: the learner serves everything. ``adapters``: versions are adapters; None:
        they have all weights. ``device``: the engine's; None: it is the engine's alone.
        """
        self._context = context
        self._engine = engine
        self._verifier = Verifier(engine, kv_heads, work_directory / LOADED / "sums")
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
        self._replica = Replica(work_directory) if weight_peers is None else weight_peers.replica
        self._loader = EngineLoader(engine, self._verifier, work_directory, metrics)
        self._adapters = None if adapters is None else AdapterLoader(engine, self._verifier, work_directory, adapters)
        self._device = EngineDevice(engine, None, clock=clock, metrics=metrics) if device is None else device
        # Whoever loads a version or gives the device up. Nobody waits for the learner inside.
        self._loads = asyncio.Lock()
        # Whoever changes the copy, or reads it beside the task that fetches. Before ``_loads``, where both are needed.
        self._copy = asyncio.Lock()
        self._failed_releases = 0
        self._announced = (0, "")
        self._wake = asyncio.Event()
        self._failed_loads = 0
        self._num_clients = 0
        self._ranks = RankConnections(self._connected, clock)
        self._is_compared = False
        """The engine computes what the learner does: its configuration stays as it is."""
        self.policy_version = 0
        self.quarantined = ""
        self.loading = False
        self.may_generate = asyncio.Event()
        """Set while the engine serves a verified version and no update is under way."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """``callback`` is called when the served version changes, also to none."""
        self._on_change = callback

    def announce(self, policy_version: int, endpoint: str) -> None:
        """Note the broker's announcement that ``policy_version`` can be fetched at ``endpoint``."""
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
                    # A rollout that serves a version continues with it, whatever it is told.
                    self._on_not_fetched(endpoint, error)
                    await asyncio.sleep(self._retry_s)

    async def _follow(self, endpoint: str) -> None:
        """Load versions from one weight server until the newest is served or the server moved."""
        async with self._connected(endpoint) as client:
            while self._announced[1] == endpoint and self._announced[0] > self.policy_version:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await client.connected_welcome()
                    begin = self._clock.now()
                    async with self._copy:
                        weights = await fetch_newest(
                            client,
                            self.policy_version,
                            self._replica,
                            fetched=self._count,
                            sources=self._weight_peers,
                            engine_hash=await self._known_hash(),
                            ranks=self._ranks,
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
        """Return the hash in which the learner shall say what an engine with the model below adapters reports; None: it
        need not, or the hash is unknown."""
        if self._adapters is None or not self._adapters.wants_checksums:
            return None
        try:
            return await self._verifier.hash()
        except EngineError as error:
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
        if self._adapters is not None:
            await self._load_adapter(client, weights, self._adapters)
            return
        version, digest = weights.policy_version, weights.digest
        if weights.current.adapter is not None:
            raise ServiceError(
                f'policy version {version} is an adapter, and lora.publish is "merged" here: the learner has other '
                "settings; give learner and rollouts the same, and start them again"
            )
        try:
            async with self._loads:
                pause_s = await self._serve(weights)
        except (EngineError, VerificationError) as error:
            await self._on_failed(client, version, digest, str(error))
            return
        await self._on_loaded(client, version, digest, pause_s)

    async def _serve(self, weights: Replica) -> float:
        """Have the engine serve a version, on its device. Returns the seconds of the pause. Raises: EngineError,
        VerificationError."""
        self.loading = True
        try:
            if await self._device.take() or self.policy_version == 0:
                weights.must_load_all()
            prepared = await self._loader.prepare(weights)
            self.may_generate.clear()
            begin = self._clock.now()
            await self._engine.pause(self._pause_mode)
            await self._loader.load(weights, prepared)
            await self._device.complete()
            await self._engine.resume()
            await self._compare(weights.current.probe)
            self.policy_version, self.quarantined = weights.policy_version, ""
            self.may_generate.set()
            return self._clock.now() - begin
        finally:
            self.loading = False
            await self._loader.tidy()

    async def _compare(self, probe: Probe | None) -> None:
        """Once, before this engine generates anything. Raises: ConfigurationError when it does not compute what the learner
        does; EngineError."""
        if self._is_compared or probe is None:
            return
        await require_same_policy(self._engine, probe)
        self._is_compared = True

    @property
    def has_device(self) -> bool:
        """Whether the engine may use the device now: always, unless the learner uses it, too."""
        return self._device.has_device

    async def bring_back(self) -> None:
        """Take the device, and have the engine serve again what it served when it last had it.

        Does nothing where a version is on its way: that will take the device. Raises: ServiceError.
        """
        async with self._copy, self._loads:
            if self.may_generate.is_set() or not self.policy_version or self._replica.policy_version != self.policy_version:
                return
            try:
                await self._serve(self._replica)
            except (EngineError, VerificationError) as error:
                raise ServiceError(f"the engine did not load policy version {self.policy_version} again: {error}") from error
        log.info("weights_brought_back", policy_version=self.policy_version)

    async def give_up(self, may: Callable[[], bool]) -> None:
        """Give the device back, if ``may`` says so once nothing is being loaded. The version counts as served all the same.

        Raises: ServiceError when the engine refuses to release its memory.
        """
        async with self._loads:
            if not self._device.has_device or not may():
                return
            self.may_generate.clear()
            try:
                if not self._verifier.known:
                    # Once the memory is gone there is nothing to compute checksums of, and the next fetch wants their kind.
                    await self._verifier.hash()
                await self._engine.pause("retract")
                await self._device.give_back()
            except EngineError as error:
                self._on_not_released(error)
            else:
                self._failed_releases = 0

    def _on_not_released(self, error: Exception) -> None:
        self._failed_releases += 1
        log.warning("memory_not_released", error=str(error), attempt=self._failed_releases)
        if self._failed_releases >= MAX_FAILED_RELEASES:
            raise ServiceError(
                f"the engine does not release its memory, for which the learner waits: {error}; it is started again, which "
                "frees all of it"
            ) from error

    async def _load_adapter(self, client: PeerClient, weights: Replica, adapters: AdapterLoader) -> None:
        """The engine generates on meanwhile, with the version that it served before."""
        version, digest = weights.policy_version, weights.digest
        self.loading = True
        try:
            loaded = await adapters.load(weights)
            begin = self._clock.now()
            adapters.serve(loaded)
            await self._compare(weights.current.probe)
            self.policy_version, self.quarantined = version, ""
            self.may_generate.set()
            await adapters.retire_former()
            pause_s = self._clock.now() - begin
        except BaseUnknownError as error:
            log.info("base_not_known_yet", reason=str(error))
            await asyncio.sleep(self._retry_s)
            return
        except (EngineError, VerificationError) as error:
            # The earlier version, if any, is unchanged.
            self._replica.forget()
            self.quarantined = "" if self.policy_version else str(error)
            await self._on_not_loaded(client, version, digest, str(error))
            return
        finally:
            self.loading = False
        await self._on_loaded(client, version, digest, pause_s)

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
        self._loader.doubt()
        self.may_generate.clear()
        self._replica.forget()
        self.policy_version, self.quarantined = 0, error
        await self._on_not_loaded(client, version, digest, error)

    async def _on_not_loaded(self, client: PeerClient, version: int, digest: str, error: str) -> None:
        """Count and report a failed load. Raises: ServiceError after several in a row."""
        self._failed_loads += 1
        self._metrics.policy_version.set(self.policy_version)
        self._metrics.weight_updates.labels(outcome="failed").inc()
        log.error("weights_not_loaded", policy_version=version, error=error, attempt=self._failed_loads)
        self._on_change()
        await client.send(Loaded(policy_version=version, digest=digest, error=shortened(error)))
        if self._failed_loads >= MAX_FAILED_LOADS:
            raise ServiceError(f"the engine did not load policy version {version}: {error}")
        await asyncio.sleep(self._retry_s)
