"""The three processes of a run as their entry points wire them, on the simulated network, engine and trainer."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from protocol.channels import BATCH, WORK, ChannelSpec
from protocol.codec import Array
from protocol.limits import MAX_QUEUED, MAX_TURNS
from protocol.messages import Message, Role
from services.broker.entry import ledger_config
from services.broker.ledger.ledger import Ledger
from services.broker.metrics import BrokerMetrics
from services.broker.metrics_file import METRICS_FILE, MetricsFile
from services.broker.quotas import QUOTAS, OffenceReason, Places, Quota
from services.broker.retention import Retention
from services.broker.rows import ArchivedRow, ArchiveRow, BatchRow, LedgerContents, TrajectoryRow
from services.broker.service import BrokerService
from services.broker.store.commits import Commit
from services.broker.store.payload import Payload
from services.broker.store.reader import LEDGER_FILE, StoreCorrupt
from services.broker.store.store import RowChanges, Store
from services.learner.broker.batches import Answer
from services.learner.broker.loop import BrokerLoop
from services.learner.metrics import LearnerMetrics
from services.learner.service import LearnerService
from services.rollout.environment_loop import EnvironmentLoop
from services.rollout.metrics import RolloutMetrics
from services.rollout.service import RolloutService
from services.rollout.weights.peers import WeightPeers
from services.rollout.weights.sync import WeightSync
from services.runtime.net.authenticator import Authenticator
from services.runtime.net.channel import Incoming, RouterChannel
from services.runtime.net.peer import PeerClient
from services.runtime.net.security import PLAINTEXT, Security
from services.runtime.settings.fingerprint import run_fingerprint
from services.runtime.settings.sections import Settings
from services.runtime.telemetry import Health
from tests.simulation.audit.audit import Audit
from tests.simulation.disk.damage import Damage
from tests.simulation.engine import SimEngine, SimRewards
from tests.simulation.episodes import SimEnvironment, SimTokenizer
from tests.simulation.learner import SimBackground, SimBrokerClient, SimTrainer, Turns
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, SimContext

SMALL_WORK = replace(WORK, window=6, high_water_mark=24)
"""The rollout's end of the work channel, with bounds small enough to be reached."""
SMALL_PLACES: dict[Role, Places] = {
    "rollout": Places(total=12, per_key=12, silent_s=5.0),
    "operator": Places(total=3, per_key=3, silent_s=0.0),
}
SMALL_QUOTAS: dict[OffenceReason, Quota] = {
    **QUOTAS,
    "messages": Quota(slowed=120, forgiven_per_s=40, shut_out=1600),
    "refused": Quota(slowed=4, forgiven_per_s=0.2, shut_out=16),
}
"""The broker's bounds, small enough to be reached by a hostile peer; an honest one does not come near them."""
HOSTILE_NAME = "hostile"
MAX_QUIET_S = 120.0
FETCHED = "gspo_rollout_weight_fetches_total"
SOURCES = "gspo_rollout_weight_sources_total"


class LoopClock:
    """Virtual time as the services see it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return 1000.0 + self._loop.time()


class Disk:
    """The broker's disk. While it is ``full``, transactions fail at their end."""

    def __init__(self) -> None:
        self.full = False
        self.newest_commit = 0
        self.damage: Damage | None = None
        """What was done to its files while the broker was down."""


class WatchedStore(Store):
    """The real store; it tells the audit what is durable, and its disk can be full."""

    def __init__(self, path: Path, *, fingerprint: str, run_id: str, audit: Audit, disk: Disk) -> None:
        self._audit = audit
        self._disk = disk
        super().__init__(path, fingerprint=fingerprint, run_id=run_id)
        audit.require(
            self.newest.number >= disk.newest_commit,
            "damage is an event",
            lambda: f"the broker starts at commit {self.newest.number}, {disk.newest_commit} were made",
        )

    def contents(self) -> LedgerContents:
        contents = super().contents()
        damage, self._disk.damage = self._disk.damage, None
        if damage is not None:
            self._audit.require(not damage.flipped, "damage is an event", lambda: "the broker starts with a changed row")
            self._audit.happened[f"damage without loss: {damage.kind}"] += 1
            damage.forget()
        return contents

    def batch(self, index: int) -> tuple[BatchRow, list[tuple[TrajectoryRow, Payload]]]:
        if self._audit.poison.get(index) == "unreadable":
            # Audited as if it had been sent: the broker has tried.
            self._audit.delivered_to[index].add("nobody")
            raise StoreCorrupt(f"batch {index}: poison")
        return super().batch(index)

    def commit(self, changes: RowChanges) -> None:
        super().commit(changes)
        self._disk.newest_commit = self.newest.number
        self._audit.committed(changes)
        if any(isinstance(row, ArchivedRow) for row in changes.rows):
            self._audit.archived(self, changes)

    def _write(self, changes: RowChanges) -> Commit:
        commit = super()._write(changes)
        if self._disk.full:
            self._audit.happened["commit refused by the disk"] += 1
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return commit


class WatchedRetention(Retention):
    """The real retention; it tells the audit when a file is written that the ledger does not name yet."""

    def __init__(self, path: Path, metrics: BrokerMetrics, clock: Any, *, settings: Settings, audit: Audit) -> None:
        broker = settings.broker
        file_bytes = int(broker.archive_file_mib * 2**20)
        super().__init__(path, metrics, clock, keep_batches=broker.keep_batches, file_bytes=file_bytes)
        self._audit = audit

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        result = await super()._in_thread(function)
        if isinstance(result, ArchiveRow):
            self._audit.passes("archive written")
        return result


class WatchedRouter(RouterChannel):
    """The broker's end of a channel; it tells the audit everything that the broker receives and sends."""

    def __init__(self, context: Any, spec: ChannelSpec, endpoint: str, authenticator: Authenticator, audit: Audit) -> None:
        super().__init__(context, spec, endpoint, authenticator)
        self._audit = audit

    async def receive(self) -> Incoming:
        incoming = await super().receive()
        assert incoming.received is not None, incoming.error
        if HOSTILE_NAME.encode() in incoming.peer:
            return incoming
        self._audit.broker_received(incoming.peer, incoming.received.message, incoming.received.seq)
        return incoming

    async def send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> bool:
        if HOSTILE_NAME.encode() not in peer:
            self._audit.broker_sends(peer, message, arrays)
        return await super().send(peer, message, arrays)

    async def send_to_each(self, peers: Iterable[bytes], message: Message) -> list[bytes]:
        peers = list(peers)
        for peer in [peer for peer in peers if HOSTILE_NAME.encode() not in peer]:
            self._audit.broker_sends(peer, message, None)
        return await super().send_to_each(peers, message)


class Machinery:
    """The parts that all processes of a world share."""

    def __init__(
        self, settings: Settings, environment: SimEnvironment, loop: VirtualLoop, network: Network, audit: Audit
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.loop = loop
        self.network = network
        self.audit = audit
        self.clock = LoopClock(loop)
        self.disk = Disk()


class BrokerProcess:
    """``gspo broker``."""

    def __init__(self, machinery: Machinery, process: Process, rng: random.Random) -> None:
        self._machinery = machinery
        self._process = process
        self._broker: BrokerService | None = None
        self._ledger: Ledger | None = None

    async def run(self, stop: asyncio.Event) -> None:
        machinery, settings = self._machinery, self._machinery.settings
        context: Any = SimContext(machinery.network, self._process)
        directory = settings.run.directory
        tasks = {"train": machinery.environment.tasks("train"), "eval": machinery.environment.tasks("eval")}
        fingerprint = run_fingerprint(settings)
        store = WatchedStore(
            directory / LEDGER_FILE, fingerprint=fingerprint, run_id="simulated", audit=machinery.audit, disk=machinery.disk
        )
        metrics = BrokerMetrics(CollectorRegistry())
        authenticator = Authenticator(
            context, Security.load(settings.security, "broker"), machinery.clock, metrics.authenticator_counters
        )
        with store:
            config = ledger_config(settings, tasks, store.run_id, fingerprint)  # type: ignore[arg-type]
            self._ledger = ledger = Ledger(
                config, store.contents(), machinery.clock.now(), places=SMALL_PLACES, quotas=SMALL_QUOTAS
            )
            self._broker = BrokerService(
                ledger,
                store,
                {
                    WORK: WatchedRouter(context, WORK, settings.broker.work_endpoint, authenticator, machinery.audit),
                    BATCH: WatchedRouter(context, BATCH, settings.broker.batch_endpoint, authenticator, machinery.audit),
                },
                tasks,  # type: ignore[arg-type]
                MetricsFile(directory / METRICS_FILE),
                metrics,
                Health(machinery.clock, MAX_QUIET_S),
                machinery.clock,
                machinery.clock.now,
                commit_interval_s=settings.broker.commit_interval_s,
                temperature=settings.sampling.temperature,
                retention=WatchedRetention(
                    directory / LEDGER_FILE, metrics, machinery.clock, settings=settings, audit=machinery.audit
                ),
            )
            try:
                await self._broker.run(stop)
            finally:
                context.destroy()

    def check_bounds(self) -> None:
        """G6: every queue and table has a bound."""
        if self._broker is None or self._ledger is None:
            return
        require, batch, state = self._machinery.audit.require, self._machinery.settings.batch, self._ledger.state
        queued = len(self._broker._arrivals)
        require(queued <= MAX_QUEUED, "G6 bounded", lambda: f"the broker's queue holds {queued} messages")
        open_groups, most = state.groups.num_training, (batch.max_lag + 1) * batch.groups_per_batch
        require(open_groups <= most, "G6 bounded", lambda: f"{open_groups} groups are open, {most} fit the window")
        routes = self._broker._sessions.num_routes
        require(routes <= 64, "G6 bounded", lambda: f"the broker keeps {routes} routes")
        self._check_honest_peers(self._ledger)

    def _check_honest_peers(self, ledger: Ledger) -> None:
        """Whatever a hostile peer does, honest ones keep their standing and their place."""
        require = self._machinery.audit.require
        for each in ledger.quotas.limited(self._machinery.clock.now()):
            require(HOSTILE_NAME in each["peer"], "honest peers are not limited", lambda: str(each))  # noqa: B023
            self._machinery.audit.happened[f"hostile peer {each['standing']}"] += 1
        for peer in ledger.peers.of_role("rollout"):
            gone = ledger.fleet.state(peer.key.peer) == "gone"
            require(not gone, "a session ends only itself", lambda: f"{peer.key.peer} is here, and is gone")  # noqa: B023


class RolloutProcess:
    """``gspo rollout``, with its engine."""

    def __init__(
        self, machinery: Machinery, process: Process, rng: random.Random, *, token_s: float, shares_weights: bool
    ) -> None:
        self._shares_weights = shares_weights
        self._weight_peers: WeightPeers | None = None
        self._machinery = machinery
        self._process = process
        self.engine = SimEngine(process, rng, machinery.audit, token_s=token_s, mean_tokens=8)
        self.rewards = SimRewards(rng, machinery.audit)
        self._broker: PeerClient | None = None
        self._sync: WeightSync | None = None
        self._service: RolloutService | None = None

    async def run(self, stop: asyncio.Event) -> None:
        machinery, settings, process = self._machinery, self._machinery.settings, self._process
        context: Any = SimContext(machinery.network, process)
        registry = CollectorRegistry()
        metrics: Any = RolloutMetrics(registry)
        self._broker = broker = PeerClient(
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
        loop = EnvironmentLoop(
            environment=machinery.environment,
            tokenizer=tokenizer,
            engine=engine,
            rewards=rewards,
            broker=broker,
            may_generate=sync.may_generate,
            sampling=settings.sampling,
            max_turns=MAX_TURNS,
            chunk_tokens=settings.rollout.chunk_tokens,
            metrics=metrics,
        )
        self._service = RolloutService(
            episodes=loop,
            broker=broker,
            sync=sync,
            settings=settings.rollout,
            clock=machinery.clock,
            health=Health(machinery.clock, MAX_QUIET_S),
            metrics=metrics,
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
        if self._broker is None or self._service is None:
            return
        require, name = self._machinery.audit.require, self._process.session
        unacknowledged, inbox = self._broker.num_unacknowledged, self._broker.inbox.qsize()
        require(
            unacknowledged <= SMALL_WORK.window, "G6 bounded", lambda: f"{name} has {unacknowledged} unacknowledged messages"
        )
        require(inbox <= SMALL_WORK.high_water_mark, "G6 bounded", lambda: f"{name}'s inbox holds {inbox} messages")
        running = len(self._service._running)
        most = self._machinery.settings.rollout.max_running
        require(running <= most, "G6 bounded", lambda: f"{name} runs {running} episodes, {most} are allowed")
        replica = self._sync._replica if self._sync is not None else None
        if replica is not None and replica.manifest is not None:
            self._machinery.audit.replicates(name, replica.policy_version, bytes(replica.data))
        if unacknowledged == SMALL_WORK.window:
            self._machinery.audit.happened["window full"] += 1


class LearnerProcess:
    """``gspo learner``, one rank."""

    def __init__(
        self,
        machinery: Machinery,
        process: Process,
        rng: random.Random,
        *,
        batch_s: float,
        weights_endpoint: str,
        has_tables: bool,
        is_deterministic: bool,
    ) -> None:
        self._machinery = machinery
        self._process = process
        self._weights_endpoint = weights_endpoint
        self._arrived: asyncio.Queue[Answer] = asyncio.Queue(maxsize=4)
        self.trainer = SimTrainer(
            process, rng, machinery.audit, batch_s=batch_s, has_tables=has_tables, is_deterministic=is_deterministic
        )

    async def run(self, stop: asyncio.Event) -> None:
        machinery = self._machinery
        learner = machinery.settings.learner.model_copy(update={"weights_endpoint": self._weights_endpoint})
        settings = machinery.settings.model_copy(update={"learner": learner})
        context: Any = SimContext(machinery.network, self._process)
        health = Health(machinery.clock, MAX_QUIET_S)
        metrics = LearnerMetrics(CollectorRegistry())
        broker_loop = BrokerLoop(
            settings,
            context,
            session=self._process.session,
            clock=machinery.clock,
            health=health,
            metrics=metrics,
            arrived=self._arrived.put_nowait,
        )
        client = SimBrokerClient(broker_loop, self._arrived, machinery.audit)
        self.trainer.broker = client
        client.trainer = self.trainer
        trainer: Any = self.trainer
        stopped = threading.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = SimBackground(tasks)
                service = LearnerService(
                    settings,
                    trainer,
                    client,
                    clock=machinery.clock,
                    health=health,
                    metrics=metrics,
                    stop=stopped,
                    train=trainer.train,
                    background=background,
                    life=self._process.session,
                )
                client.turns = background.turns = Turns(service.run)
                talking = tasks.create_task(broker_loop.run(lambda: None))
                stopping = tasks.create_task(_forward(stop, stopped))
                await client.turns.run()
                talking.cancel()
                stopping.cancel()
        finally:
            context.destroy()

    def check_bounds(self) -> None:
        """G6: every queue and table has a bound."""
        arrived = self._arrived.qsize()
        self._machinery.audit.require(
            arrived <= 1, "G6 bounded", lambda: f"{arrived} batches wait in the learner, which requests one at a time"
        )


async def _forward(stop: asyncio.Event, stopped: threading.Event) -> None:
    """Pass SIGTERM on to the training thread."""
    await stop.wait()
    stopped.set()
