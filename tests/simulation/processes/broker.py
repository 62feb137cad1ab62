"""``gspo broker`` in virtual time."""

import asyncio
import random
from typing import Any

from prometheus_client import CollectorRegistry

from gspo_protocol.channels import BATCH, WORK
from gspo_protocol.limits import MAX_QUEUED
from gspo_protocol.messages import Role
from gspo_services.broker.entry import ledger_config
from gspo_services.broker.ledger.ledger import Ledger
from gspo_services.broker.metrics import BrokerMetrics
from gspo_services.broker.metrics_file import METRICS_FILE, MetricsFile
from gspo_services.broker.quotas import QUOTAS, OffenceReason, Places, Quota
from gspo_services.broker.service import BrokerService
from gspo_services.broker.store.reader import LEDGER_FILE
from gspo_services.shared.net.authenticator import Authenticator
from gspo_services.shared.net.security import Security
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.fingerprint import run_fingerprint
from gspo_services.shared.settings.run_settings import write_run_settings
from tests.simulation.loop import Process
from tests.simulation.network import SimContext
from tests.simulation.processes.machinery import MAX_QUIET_S, Machinery
from tests.simulation.processes.watched import HOSTILE_NAME, WatchedRetention, WatchedRouter, WatchedStore

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


class BrokerProcess:
    """``gspo broker``."""

    def __init__(self, machinery: Machinery, process: Process, rng: random.Random) -> None:
        self._audit = machinery.audit
        self._machinery = machinery
        self._process = process
        self._broker: BrokerService | None = None
        self._ledger: Ledger | None = None

    async def run(self, stop: asyncio.Event) -> None:
        machinery, settings = self._machinery, self._machinery.settings
        disk, broker = machinery.disk, settings.broker
        context: Any = SimContext(machinery.network, self._process)
        directory = settings.run.directory
        tasks = {split: machinery.environment.tasks(split) for split in ("train", "eval")}
        fingerprint = run_fingerprint(settings)
        store = WatchedStore(
            directory / LEDGER_FILE, fingerprint=fingerprint, run_id="simulated", audit=self._audit, disk=disk
        )
        metrics = BrokerMetrics(CollectorRegistry())
        authenticator = Authenticator(
            context, Security.load(settings.security, "broker"), machinery.clock, metrics.authenticator_counters
        )
        with store:
            write_run_settings(settings)
            config = ledger_config(settings, tasks, store.run_id, fingerprint)  # type: ignore[arg-type]
            self._ledger = ledger = Ledger(
                config, store.contents(), machinery.clock.now(), places=SMALL_PLACES, quotas=SMALL_QUOTAS
            )
            self._broker = BrokerService(
                ledger,
                store,
                {
                    WORK: WatchedRouter(context, WORK, broker.work_endpoint, authenticator, self._audit),
                    BATCH: WatchedRouter(context, BATCH, broker.batch_endpoint, authenticator, self._audit),
                },
                tasks,  # type: ignore[arg-type]
                MetricsFile(directory / METRICS_FILE),
                metrics,
                Health(machinery.clock, MAX_QUIET_S),
                machinery.clock,
                machinery.clock.now,
                commit_interval_s=settings.broker.commit_interval_s,
                part_tokens=settings.broker.batch_part_tokens,
                retention=WatchedRetention(
                    directory / LEDGER_FILE, metrics, machinery.clock, settings=settings, audit=self._audit
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
        open_groups, most = state.groups.num_training, (batch.max_lag + 1) * self._audit.rules.groups_per_batch
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
