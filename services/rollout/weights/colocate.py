"""The engine's end of a device that the learner uses, too: the lock, and the engine's memory with it."""

import asyncio

import structlog

from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import CACHE_MEMORY, WEIGHTS_MEMORY, Engine
from gspo_services.shared.colocate import DEVICE_POLL_S, DeviceLock
from gspo_services.shared.runtime.clock import Clock

log = structlog.get_logger()


class EngineDevice:
    """The device is the engine's between ``take`` and ``give_back``. Without a lock it always is."""

    def __init__(
        self,
        engine: Engine,
        lock: DeviceLock | None,
        *,
        clock: Clock,
        metrics: RolloutMetrics,
        poll_s: float = DEVICE_POLL_S,
    ) -> None:
        """``lock``: in hand already if the engine has its memory. None: nobody else uses the device."""
        self._engine = engine
        self._lock = lock
        self._clock = clock
        self._metrics = metrics
        self._poll_s = poll_s
        self._lost = False

    @property
    def has_device(self) -> bool:
        """Whether the engine may use the device now."""
        return self._lock is None or self._lock.held

    async def take(self) -> bool:
        """Wait for the device, and give the engine room for weights. Returns whether it has lost those that it had.

        Raises: EngineError.
        """
        if self._lock is not None and not self._lock.held:
            await taken(self._lock, self._clock, self._metrics, self._poll_s)
        if self._lost:
            await self._engine.memory.take_back(WEIGHTS_MEMORY)
        return self._lost

    async def complete(self) -> None:
        """The weights are loaded: give the engine room for its cache. Raises: EngineError."""
        if self._lost:
            await self._engine.memory.take_back(CACHE_MEMORY)
            self._lost = False

    async def give_back(self) -> None:
        """Have the paused engine give up its memory, and the device with it. Raises: EngineError; then it keeps both."""
        if self._lock is None:
            return
        self._lost = True
        await self._engine.release_memory()
        self._lock.give_back()
        self._metrics.has_device.set(0)
        log.info("device_given_back")


async def taken(lock: DeviceLock, clock: Clock, metrics: RolloutMetrics, poll_s: float = DEVICE_POLL_S) -> DeviceLock:
    """Wait for the device.

    waits for:    the device
    unblocked by: the learner gives it back, or its process ends
    """
    begin, holder = clock.now(), ""
    while not lock.try_take():
        if holder != (found := lock.holder):
            holder = found
            log.info("waiting_for_device", holder=holder)
        await asyncio.sleep(poll_s)
    waited_s = clock.now() - begin
    metrics.device_acquired.inc()
    metrics.device_wait_seconds.inc(waited_s)
    metrics.has_device.set(1)
    log.info("device_taken", waited_s=round(waited_s, 3))
    return lock
