"""``gspo rollout`` in virtual time."""

import asyncio
import random
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from gspo_protocol.channels import WORK
from gspo_protocol.limits import MAX_TURNS
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.gathering import MAX_WAITING, GatheringClient
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.service import RolloutService
from gspo_services.rollout.weights.peers import WeightPeers
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.rollout.work import EpisodeRunner
from gspo_services.shared.net.security import PLAINTEXT
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.fingerprint import run_fingerprint
from tests.simulation.agents.opening import open_agents
from tests.simulation.engine import SimEngine, SimRewards
from tests.simulation.episodes import SimTokenizer
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes.machinery import MAX_QUIET_S, Machinery
from tests.support.agent_episodes import counted

SMALL_WORK = replace(WORK, window=6, high_water_mark=24)
"""The rollout's end of the work channel, with bounds small enough to be reached."""
FETCHED = "gspo_rollout_weight_fetches_total"
SOURCES = "gspo_rollout_weight_sources_total"


class RolloutProcess:
    """``gspo rollout``, with its engine."""

    def __init__(
        self, machinery: Machinery, process: Process, rng: random.Random, *, token_s: float, shares_weights: bool
    ) -> None:
        self._shares_weights = shares_weights
        self._weight_peers: WeightPeers | None = None
        self._machinery = machinery
        self._process = process
        self._rng = rng
        self._divergences: Counter | None = None
        self.engine = SimEngine(process, rng, machinery.audit, token_s=token_s, mean_tokens=8)
        self.rewards = SimRewards(rng, machinery.audit)
        self._client: GatheringClient | None = None
        self._sync: WeightSync | None = None
        self._service: RolloutService | None = None

    async def run(self, stop: asyncio.Event) -> None:
        machinery, settings, process = self._machinery, self._machinery.settings, self._process
        context: Any = SimContext(machinery.network, process)
        registry = CollectorRegistry()
        metrics: Any = RolloutMetrics(registry)
        self._divergences = metrics.divergences
        self._client = broker = GatheringClient(
            context,
            SMALL_WORK,
            settings.broker.work_endpoint,
            role="rollout",
            peer=process.name,
            session=process.session,
            clock=machinery.clock,
            fingerprint=run_fingerprint(settings),
        )
        engine: Any = self.engine
        if self._shares_weights:
            self._weight_peers = WeightPeers(
                context,
                machinery.network.free_endpoint(process.name),
                peer=process.name,
                session=process.session,
                clock=machinery.clock,
                metrics=metrics,
                security=PLAINTEXT,
                directory=settings.run.directory / process.session,
            )
        self._sync = sync = WeightSync(
            context=context,
            engine=engine,
            work_directory=settings.run.directory / process.session,
            pause_mode=settings.rollout.pause_mode,
            peer=process.name,
            session=process.session,
            clock=machinery.clock,
            metrics=metrics,
            weight_peers=self._weight_peers,
        )
        tokenizer: Any = SimTokenizer()
        rewards: Any = self.rewards
        episodes: EpisodeRunner
        if settings.agent.is_used:
            episodes = open_agents(
                machinery,
                process,
                self._rng,
                engine=engine,
                rewards=rewards,
                broker=broker,
                may_generate=sync.may_generate,
                metrics=metrics,
            )
        else:
            episodes = EnvironmentLoop(
                environment=machinery.environment,
                tokenizer=tokenizer,
                engine=engine,
                rewards=rewards,
                broker=broker,
                may_generate=sync.may_generate,
                max_turns=MAX_TURNS,
                chunk_tokens=settings.rollout.chunk_tokens,
                metrics=metrics,
            )
        self._service = RolloutService(
            episodes=episodes,
            broker=broker,
            sync=sync,
            settings=settings.rollout,
            clock=machinery.clock,
            health=Health(machinery.clock, MAX_QUIET_S),
            metrics=metrics,
            groups=GroupRewards(
                settings=settings.reward, rewards=rewards, tokenizer=tokenizer, broker=broker, metrics=metrics
            ),
        )
        try:
            await self._service.run(stop)
        finally:
            if self._weight_peers is not None:
                self._weight_peers.close()
            context.destroy()
            self._count(registry)

    def _count(self, registry: CollectorRegistry) -> None:
        """Add the outcomes of its fetches to what happened."""
        happened = self._machinery.audit.happened
        for kind in ("snapshot", "delta"):
            happened[f"{kind} fetched"] += int(registry.get_sample_value(FETCHED, {"kind": kind}) or 0)
        for outcome in ("fetched", "failed", "damaged"):
            happened[f"weight_peer: {outcome}"] += int(registry.get_sample_value(SOURCES, {"outcome": outcome}) or 0)
        happened["damaged weights found"] += int(registry.get_sample_value("gspo_rollout_weights_damaged_total") or 0)

    def check_bounds(self) -> None:
        """G6: every queue and table has a bound."""
        if self._service is None:
            return
        require, name = self._machinery.audit.require, self._process.session
        if self._client is not None:
            self._check_client(self._client, name)
        running = len(self._service._running)
        most = self._machinery.settings.rollout.max_running
        require(running <= most, "G6 bounded", lambda: f"{name} runs {running} episodes, {most} are allowed")
        replica = self._sync._replica if self._sync is not None else None
        if replica is not None and replica.manifest is not None:
            content = b"".join(data for _, data in replica.tensors())
            self._machinery.audit.replicates(name, replica.policy_version, content)
        if self._divergences is not None:
            self._machinery.audit.counts_divergences(name, counted(self._divergences))

    def _check_client(self, client: GatheringClient, name: str) -> None:
        require = self._machinery.audit.require
        unacknowledged, waiting, inbox = client._outbox.num_unacked, len(client._waiting), client.inbox.qsize()
        require(
            unacknowledged <= SMALL_WORK.window, "G6 bounded", lambda: f"{name} has {unacknowledged} unacknowledged messages"
        )
        require(waiting <= MAX_WAITING, "G6 bounded", lambda: f"{name} has {waiting} messages that wait to be gathered")
        require(inbox <= SMALL_WORK.high_water_mark, "G6 bounded", lambda: f"{name}'s inbox holds {inbox} messages")
        if unacknowledged == SMALL_WORK.window:
            self._machinery.audit.happened["window full"] += 1
