"""A rollout: one SGLang server and the episodes in flight on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from gspo_protocol.messages import (
    Grade,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseKey,
    LeaseRequest,
    NoLease,
    Pulse,
    Release,
    Welcome,
)
from gspo_protocol.messages.base import shortened
from gspo_protocol.messages.work import RolloutStatus
from gspo_services.rollout.broker import HEARTBEAT_S, Ask, LeaseRequests, no_answer, why_away
from gspo_services.rollout.colocate import TimeSharing
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.held_leases import HeldLease, WorkSeen
from gspo_services.rollout.metrics import STATUSES, RolloutMetrics
from gspo_services.rollout.sglang import EngineError
from gspo_services.rollout.weights import WeightSync
from gspo_services.rollout.work import EpisodeFailed, EpisodeRunner, EpisodeSpared, EpisodeWork
from gspo_services.shared.net import Delivered, PeerClient
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.runtime.lifecycle import until_stopped
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings import Rollout
from gspo_services.tasks.environments import reason_of

log = structlog.get_logger()

ENGINE_FAILURES_ALLOWED: Final = 3
STOP_SHARE: Final = 0.2
"""Share of rollout.drain_s in which the engine ends what it generates."""
ENGINE_PAUSE_S: Final = 1.0


class RolloutService:
    """Leases in, chunks and finishes out.

    produces:     episodes, at most ``max_running`` at a time; heartbeats
    waits for:    leases; weights
    unblocked by: Lease, NoLease and its pause, Pulse; a finished episode
    """

    def __init__(
        self,
        *,
        episodes: EpisodeRunner,
        broker: PeerClient,
        sync: WeightSync,
        settings: Rollout,
        clock: Clock,
        health: Health,
        metrics: RolloutMetrics,
        sharing: TimeSharing | None = None,
        groups: GroupRewards | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        run_began: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``sharing``: of the engine's device; None: it is the engine's alone. ``groups``: compares answers; None: nothing
        does (``reward.group``). ``run_began``: told on which day, before the first lease."""
        self._episodes = episodes
        self._broker = broker
        self._sync = sync
        self._settings = settings
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._sharing = sharing
        self._groups = groups
        self._run_began = run_began
        self._running: dict[int, HeldLease] = {}
        self._late: list[asyncio.Task[None]] = []
        self._seen = WorkSeen()
        self._wake = asyncio.Event()
        self._requests = LeaseRequests(settings.max_running)
        self._draining = False
        self._said: RolloutStatus | None = None
        """The status in the last heartbeat of this connection."""
        self._engine_failures = 0
        self._is_over = asyncio.Event()
        """Set once the broker has ended the run."""
        metrics.episodes_limit.set(settings.max_running)
        sync.on_change(self._wake.set)

    async def run(self, stop: asyncio.Event) -> bool:
        """Work until ``stop`` is set or the run is over; then hand everything back. Returns whether the run is over.

        Raises: ServiceError when the engine keeps failing.
        """
        async with self._channels():
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(self._receive(tasks), name="receive")
                loops = [
                    tasks.create_task(self._ask(), name="ask"),
                    tasks.create_task(self._beat(), name="heartbeat"),
                ]
                if self._sharing is not None:
                    loops.append(tasks.create_task(self._sharing.run(lambda: len(self._running)), name="time-sharing"))
                await self._until_over(stop)
                self._draining = True
                for loop in loops:
                    loop.cancel()
                await self._drain()
                for task in (receiving, *self._late):
                    task.cancel()
        return self._is_over.is_set()

    @asynccontextmanager
    async def _channels(self) -> AsyncIterator[None]:
        """Keep the broker's channel and the weight channel open until everything is handed back."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._broker.run(), name="broker-client"),
                tasks.create_task(self._sync.run(), name="weight-sync"),
            ]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def _until_over(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(event.wait()) for event in (stop, self._is_over)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    @property
    def _status(self) -> RolloutStatus:
        if self._draining:
            return "draining"
        if self._sync.quarantined:
            return "quarantined"
        if self._sync.policy_version == 0:
            return "verifying" if self._sync.loading else "starting"
        return "serving"

    # --- receive -----------------------------------------------------------------------------------------------------

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            delivered = await self._broker.inbox.get()
            self._health.beat()
            self._on_message(delivered, tasks)

    def _on_message(self, delivered: Delivered, tasks: asyncio.TaskGroup) -> None:
        message = delivered.message
        if isinstance(message, Welcome | Pulse):
            # Followed also back to what is left after a loss.
            self._sync.announce(message.policy_version, message.weights_endpoint)
        if isinstance(message, Welcome):
            self._run_began(message.begun_on)
            self._requests.welcomed()
            self._said = None
            self._wake.set()
        elif isinstance(message, Pulse):
            if message.stopping:
                self._is_over.set()
        elif isinstance(message, Lease | Grade):
            self._requests.leased()
            self._start_episode(message, delivered, tasks)
        elif isinstance(message, NoLease):
            if self._requests.refused(message.request_id, self._clock.now() + message.retry_s):
                if self._sharing is not None:
                    self._sharing.refused()
                self._wake.set()
        elif isinstance(message, LeaseEnded):
            self._end_episode(message)

    def _start_episode(self, lease: Lease | Grade, delivered: Delivered, tasks: asyncio.TaskGroup) -> None:
        name = f"trajectory-{lease.trajectory_id}-{lease.epoch}"
        if self._draining:
            self._late.append(tasks.create_task(self._release(lease, "draining", failed=False), name=name))
            return
        former = self._running.get(lease.trajectory_id)
        if former is None and len(self._running) >= self._settings.max_running:
            # This rollout asked twice, because the first answer took too long. Another rollout has room for the lease.
            self._late = [task for task in self._late if not task.done()]
            self._late.append(tasks.create_task(self._release(lease, "no room", failed=False), name=name))
            return
        if former is not None:
            if former.lease.epoch >= lease.epoch:
                return
            former.task.cancel("a newer lease")
        try:
            work = self._begun(lease, delivered, tasks)
        # Nothing of a lease that cannot even be read ends the rollout.
        except Exception as error:  # noqa: BLE001
            reason = str(error) if isinstance(error, EpisodeFailed) else reason_of(error)[1]
            self._metrics.episodes.labels(outcome="failed").inc()
            self._late.append(tasks.create_task(self._release(lease, reason, failed=True), name=name))
            return
        task = tasks.create_task(self._episode(lease, work), name=name)
        self._running[lease.trajectory_id] = HeldLease(lease=lease, work=work, task=task)
        if self._sharing is not None:
            self._sharing.leased()
        self._metrics.episodes_running.set(len(self._running))
        if isinstance(lease, Lease) and lease.num_tokens:
            self._metrics.resumed.inc()
            log.info("trajectory_resumed", trajectory_id=lease.trajectory_id, epoch=lease.epoch, num_tokens=lease.num_tokens)

    def _begun(self, lease: Lease | Grade, delivered: Delivered, tasks: asyncio.TaskGroup) -> EpisodeWork:
        """Raises: EpisodeFailed."""
        if isinstance(lease, Lease):
            return self._episodes.begin(lease, delivered.arrays, tasks)
        if self._groups is None:
            raise EpisodeFailed("this rollout has no reward.group, but the broker has: start both with one configuration")
        return self._groups.begin(lease, delivered.arrays)

    def _end_episode(self, ended: LeaseEnded) -> None:
        running = self._running.get(ended.trajectory_id)
        if running is not None and running.lease.epoch == ended.epoch:
            log.info("lease_ended", trajectory_id=ended.trajectory_id, epoch=ended.epoch, reason=ended.reason)
            self._metrics.episodes.labels(outcome="lease_ended").inc()
            self._forget(running.lease)
            running.task.cancel("lease ended")

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def _episode(self, lease: Lease | Grade, work: EpisodeWork) -> None:
        begin = self._clock.now()
        is_sampled = isinstance(lease, Lease)
        try:
            if self._sharing is not None and is_sampled:
                # An agent's deadline begins with its episode, and must not pass while the learner has the device.
                await self._sync.may_generate.wait()
            await work.run()
            if is_sampled:
                self._engine_failures = 0
        except EpisodeFailed as error:
            if self._draining:
                # An agent fails when its calls are refused; its own fault recurs wherever it continues.
                await self._hand_back(lease, work)
                return
            if isinstance(error, EpisodeSpared):
                await self._hand_back(lease, work, str(error))
                return
            log.warning("episode_failed", trajectory_id=lease.trajectory_id, reason=str(error))
            self._metrics.episodes.labels(outcome="failed").inc()
            await self._release(lease, str(error), failed=True)
        except EngineError as error:
            if self._draining:
                await self._hand_back(lease, work)
                return
            self._metrics.episodes.labels(outcome="engine_error").inc()
            await self._send_rest(lease, work)
            self._on_engine_error(error)
            # An engine that has died ends this rollout meanwhile. Then its leases are lost, and not handed back: the broker
            # counts how often that happens to a trajectory.
            await asyncio.sleep(ENGINE_PAUSE_S)
            await self._release(lease, f"engine: {error}", failed=False)
        finally:
            # While draining, the episode stays on the list: its unsent tokens are still to be handed back.
            if not self._draining:
                self._forget(lease)
            self._metrics.episode_seconds.observe(self._clock.now() - begin)
            self._wake.set()

    def _forget(self, lease: Lease | Grade) -> None:
        running = self._running.get(lease.trajectory_id)
        if running is not None and running.lease.epoch == lease.epoch:
            del self._running[lease.trajectory_id]
        self._metrics.episodes_running.set(len(self._running))

    async def _release(self, lease: Lease | Grade, reason: str, *, failed: bool) -> None:
        await self._broker.send(
            Release(trajectory_id=lease.trajectory_id, epoch=lease.epoch, reason=shortened(reason), failed=failed)
        )

    def _on_engine_error(self, error: EngineError) -> None:
        self._engine_failures += 1
        log.warning("engine_error", error=str(error), failures=self._engine_failures)
        self._requests.pause(self._clock.now() + ENGINE_PAUSE_S)
        if self._engine_failures >= ENGINE_FAILURES_ALLOWED * max(1, self._settings.max_running):
            raise ServiceError(f"the engine keeps failing: {error}")

    async def _drain(self) -> None:
        """Hand unfinished trajectories back. Tokens that the broker does not acknowledge in time are sampled again."""
        self._health.not_ready("draining")
        episodes = list(self._running.values())
        log.info("draining", episodes=len(episodes), budget_s=self._settings.drain_s)
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await self._send_heartbeat()
                await self._stop_generating([episode.task for episode in episodes])
                for episode in episodes:
                    episode.task.cancel("draining")
                if episodes:
                    await asyncio.wait([episode.task for episode in episodes])
                for episode in episodes:
                    # Not an episode that ended by itself meanwhile, nor a lease that the broker took away.
                    if episode.task.cancelled() and self._running.get(episode.lease.trajectory_id) is episode:
                        await self._hand_back(episode.lease, episode.work)
                await self._broker.flushed()
        except TimeoutError:
            log.warning("drain_incomplete", unacknowledged=self._broker.num_unacknowledged)

    async def _stop_generating(self, tasks: list[asyncio.Task[None]]) -> None:
        """Have the engine end every request with the tokens that it has made. Where it does not in time, those of the last
        piece are lost."""
        if not tasks:
            return
        try:
            async with asyncio.timeout(self._settings.drain_s * STOP_SHARE):
                await self._episodes.stop_generating()
                await asyncio.wait(tasks)
        except (TimeoutError, EngineError) as error:
            running = sum(not task.done() for task in tasks)
            log.info("generation_cut_off", episodes=running, reason=str(error) or "the engine did not end them in time")

    async def _send_rest(self, lease: Lease | Grade, work: EpisodeWork) -> None:
        try:
            await work.send_rest()
        except EpisodeFailed as error:
            log.warning("not_handed_back", trajectory_id=lease.trajectory_id, reason=str(error))

    async def _hand_back(self, lease: Lease | Grade, work: EpisodeWork, reason: str = "draining") -> None:
        await self._send_rest(lease, work)
        await self._release(lease, reason, failed=False)
        self._metrics.episodes.labels(outcome="handed_back").inc()
        self._forget(lease)

    # --- leases and heartbeats ---------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            now = self._clock.now()
            if self._status == "serving" and self._broker.connected:
                ask = self._requests.ask(now, len(self._running))
                if ask is not None:
                    await self._send_request(ask)
            until = self._requests.pauses_until(now)
            pause_s = self._heartbeat_s if until is None else min(until - now, self._heartbeat_s)
            await until_stopped(self._wake, pause_s)
            self._wake.clear()

    async def _send_request(self, ask: Ask) -> None:
        if self._said != "serving":
            # The broker gives leases only to a rollout that has said that it serves.
            await self._send_heartbeat()
        version = self._sync.policy_version
        if self._sharing is not None:
            self._sharing.asked(version, len(self._running))
        await self._broker.send(LeaseRequest(request_id=ask.request_id, capacity=ask.capacity, policy_version=version))

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            await self._send_heartbeat()
            await asyncio.sleep(self._heartbeat_s)

    async def _send_heartbeat(self) -> None:
        self._report()
        self._said = status = self._status
        leases = [LeaseKey(trajectory_id, each.lease.epoch) for trajectory_id, each in self._running.items()]
        await self._broker.send(Heartbeat(policy_version=self._sync.policy_version, status=status, leases=leases))

    def _report(self) -> None:
        """Report metrics and readiness."""
        status = self._status
        for name in STATUSES:
            self._metrics.status.labels(status=name).set(name == status)
        self._metrics.unacknowledged.set(self._broker.num_unacknowledged)
        if status != "serving":
            waits = "" if self._draining else no_answer(self._broker)
            self._health.not_ready(self._sync.quarantined or waits or status)
        elif away := why_away(self._broker):
            self._health.not_ready(away)
        elif self._has_worked():
            self._health.progress()

    def _has_worked(self) -> bool:
        """See ``WorkSeen``; also true while all episodes wait for the device."""
        return (self._sharing is not None and self._sharing.waits) or self._seen.has_worked(self._running.values())
