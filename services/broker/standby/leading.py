"""From a start to leadership, and what keeps it."""

import asyncio
import os
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from gspo_services.broker.standby.database import Database, DatabaseLog, LeaderRow, claim, leader_of, open_log, release
from gspo_services.broker.standby.ledger_copy import LedgerCopy
from gspo_services.broker.standby.watch import LeaderWatch
from gspo_services.broker.store import Store, StoreMismatch, StoreUnavailable
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.runtime.lifecycle import until_stopped
from gspo_services.shared.runtime.logs import OccasionalLog
from gspo_services.shared.runtime.process_metrics import MetricTable, gauge
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Settings


class LeadershipMetrics(MetricTable):
    """Registered once in ``registry``."""

    prefix = "gspo_broker_"
    leads = gauge("leads", "1 while this broker leads the run, 0 while it is a standby")
    commits_behind = gauge("standby_commits_behind", "Commits that a standby found at its last look")
    leader_silent_s = gauge("leader_silent_seconds", "How long a standby has not seen the leader renew its place")


log = structlog.get_logger()
T = TypeVar("T")

RENEW_S: Final = 1.0
LOOK_S: Final = 0.25
AWAY_S: Final = 1.0
"""Pause after a database that could not be used."""


def holder_name(directory: Path) -> str:
    """What others call this process: host, process and directory."""
    return f"{socket.gethostname()}:{os.getpid()} ({directory})"


class Leading:
    """The leadership of one run, which this process has from its claim on until another one takes it.

    A thread renews it: reading a long ledger keeps the event loop busy for longer than a standby waits.
    """

    def __init__(self, store: Store, appending: DatabaseLog, renewing: DatabaseLog, health: Health, clock: Clock) -> None:
        self.store = store
        self._appending = appending
        self._renewing = renewing
        self._health = health
        self._warnings = OccasionalLog(log, clock)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leadership")
        self._thread.start()

    async def run(self) -> None:
        """Wait for the end of the leadership, until cancelled. Raises: LeadershipLost; what else ended its renewal."""
        await asyncio.shield(self._ended)

    def _renew(self) -> None:
        """Renew until the end.

        produces:     the leader's row, renewed; /readyz says when that is not possible
        waits for:    the database, its own pauses
        unblocked by: time; ``end``
        """
        while not self._stop.wait(RENEW_S):
            self._renewing.confirmed = self._appending.confirmed
            try:
                self._renewing.renew()
            except StoreUnavailable as error:
                self._health.must_wait(str(error))
                self._warnings.warning("leadership_not_renewed", "renew", error=str(error))
            except Exception as error:  # noqa: BLE001 - the loop raises it, whatever it is
                self._loop.call_soon_threadsafe(self._fail, error)
                return
            else:
                self._health.must_wait("")

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # It may come after the last one who waits for it.

    async def end(self) -> None:
        """Let a standby take over at once. Call it when nothing more is committed."""
        await self._loop.run_in_executor(None, self._end)

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(StoreUnavailable, ServiceError, ConfigurationError):  # A standby then waits for takeover_s.
            release(self._renewing.database, self._appending.epoch)
        self._renewing.database.close()
        self._appending.database.close()


@asynccontextmanager
async def lead(
    settings: Settings, fingerprint: str, registry: CollectorRegistry, health: Health, clock: Clock, stop: asyncio.Event
) -> AsyncIterator[Leading | None]:
    """Wait as a standby until this broker leads the run. None: ``stop`` was set before.

    Raises: ConfigurationError, LedgerDiverged, StoreDamaged, StoreCorrupt.
    """
    assert settings.broker.database is not None
    conninfo = settings.broker.database.get_secret_value()
    # The name that every run's log has had: it must be found again.
    schema = f"{settings.broker.database_schema}_0"
    allow = settings.broker.allow_asynchronous_database
    databases = [Database(conninfo, schema, allow_asynchronous=allow) for _ in range(2)]
    metrics, takeover_s = LeadershipMetrics(registry), settings.broker.takeover_s
    standby = Standby(databases[0], settings.run.directory, fingerprint, takeover_s, metrics, health, clock)
    try:
        copy = await standby.run(stop)
        if copy is None:
            yield None
            return
        renewing = DatabaseLog(databases[1])
        renewing.epoch = standby.log.epoch
        with copy.store:
            leading = Leading(copy.store, standby.log, renewing, health, clock)
            try:
                yield leading
            finally:
                await leading.end()
    finally:
        standby.close()


class Standby:
    """Follows the log until it leads."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        fingerprint: str,
        takeover_s: float,
        metrics: LeadershipMetrics,
        health: Health,
        clock: Clock,
    ) -> None:
        self.log = DatabaseLog(database)
        self._database = database
        self._directory = directory
        self._fingerprint = fingerprint
        self._watch = LeaderWatch(takeover_s)
        self._holder = holder_name(directory)
        self._metrics = metrics
        self._health = health
        self._clock = clock
        self._warnings = OccasionalLog(log, clock)
        self._copy: LedgerCopy | None = None
        self._leads = False
        self._told: tuple[int, str] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="standby")

    async def run(self, stop: asyncio.Event) -> LedgerCopy | None:
        """Returns the ledger, with every commit in it, once this broker leads; None when ``stop`` was set before.

        produces:     a warm copy of the ledger
        waits for:    the leader's end; the database
        unblocked by: time; ``stop``
        Raises: as ``lead``.
        """
        while not stop.is_set():
            self._health.beat()
            try:
                is_done = await self._in_thread(self._step)
            except StoreMismatch as error:
                raise ConfigurationError(f"run.directory is {self._directory}: {error}") from error
            except StoreUnavailable as error:
                self._health.not_ready(f"standby: {error}")
                self._warnings.warning("standby_waits", "away", error=str(error))
                if await until_stopped(stop, AWAY_S):
                    break
                continue
            if is_done:
                return self._copy
            if await until_stopped(stop, LOOK_S):
                break
        return None

    def close(self) -> None:
        """Close what a standby that never led has open."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._copy is not None:
            self._copy.close()
        self._database.close()

    def _step(self) -> bool:
        """Follow what is certain, and take over if it is time. True: this broker leads, and has everything."""
        if self._copy is None:
            run = open_log(self._database, fingerprint=self._fingerprint, run_id=uuid.uuid4().hex[:12])
            self._copy = LedgerCopy(self._directory, run, self.log)
        if not self._leads:
            seen = leader_of(self._database)
            self._metrics.commits_behind.set(max(0, seen.confirmed - self._copy.store.newest.number))
            self._follow(seen.confirmed)
            may_take = self._watch.may_take(seen.epoch, seen.renewals, seen.released, self._clock.now())
            self._metrics.leader_silent_s.set(self._watch.silent_s)
            if not may_take:
                self._tell(seen)
                return False
            epoch = claim(self._database, seen, self._holder)
            if epoch is None:
                return False
            log.info("leadership_taken", epoch=epoch, former=seen.holder, silent_s=round(self._watch.silent_s, 1))
            self.log.epoch = epoch
            self._leads = True
        # Everything that is in the log now counts: our claim came after it, and has waited for a standby of the database.
        self.log.renew()
        newest = self.log.newest()
        self._follow(0 if newest is None else newest.number)
        self.log.confirmed = self._copy.store.newest.number
        self._copy.require_whole()
        self._metrics.leads.set(1)
        self._metrics.commits_behind.set(0)
        self._metrics.leader_silent_s.set(0)
        return True

    def _follow(self, end: int) -> None:
        assert self._copy is not None
        while self._copy.follow(end):
            self._health.beat()

    def _tell(self, seen: LeaderRow) -> None:
        self._health.opened()
        self._health.not_ready(f"standby of {seen.holder}")
        if self._told != (seen.epoch, seen.holder):
            self._told = (seen.epoch, seen.holder)
            log.info("standby", leader=seen.holder, epoch=seen.epoch)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
