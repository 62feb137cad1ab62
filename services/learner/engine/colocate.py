"""The learner's end of a device that a rollout's engine uses, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import structlog

from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.colocate import DEVICE_POLL_S, DeviceLock
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.telemetry import Health

log = structlog.get_logger()


class MovableEngine(Protocol):
    """What can leave a device and return."""

    def leave_device(self) -> None:
        """See ``HostStates.leave``."""
        ...

    def return_to_device(self) -> None:
        """See ``HostStates.come_back``."""
        ...


class LearnerDevice(Protocol):
    """When the learner may compute."""

    def held(self) -> AbstractContextManager[None]:
        """The engine may be used inside. Nobody may wait for a rollout there."""
        ...


class OwnDevice:
    """The learner has its device for itself."""

    def held(self) -> AbstractContextManager[None]:
        """At once."""
        return nullcontext()


class ColocatedDevice:
    """The learner has the device between taking the lock and giving it back; otherwise its states are in host memory.

    produces:     spans in which the learner has the device
    waits for:    the device
    unblocked by: the rollout gives it back, or its process and server end
    """

    def __init__(
        self,
        lock: DeviceLock,
        *,
        clock: Clock,
        health: Health,
        metrics: LearnerMetrics,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``pause`` waits for so many seconds."""
        self._lock = lock
        self._clock = clock
        self._health = health
        self._metrics = metrics
        self._pause = pause
        self._engine: MovableEngine | None = None

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Take the device to make the engine: loading a model takes memory. Returns without it once ``stopped``."""
        self._wait(stopped)

    def made(self, engine: MovableEngine) -> None:
        """The engine was made, and leaves the device until the first ``held``."""
        self._engine = engine
        self._give_back(engine)

    @contextmanager
    def held(self) -> Iterator[None]:
        """An error inside ends the process, and so gives the device back: nothing is moved for it."""
        engine = self._engine
        assert engine is not None, "made() comes first"
        self._wait()
        began = self._clock.now()
        engine.return_to_device()
        log.debug("states_returned", seconds=round(self._clock.now() - began, 3))
        yield
        self._give_back(engine)

    def _wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        begin, holder = self._clock.now(), ""
        while not self._lock.try_take():
            if stopped():
                return
            if holder != (found := self._lock.holder):
                holder = found
                log.info("waiting_for_device", holder=holder)
            if self._engine is None:
                self._health.not_ready(f"waits for the device, which {holder or 'another process'} has")
            else:
                self._health.progress()
            self._pause(DEVICE_POLL_S)
        waited_s = self._clock.now() - begin
        self._metrics.device_acquired.inc()
        self._metrics.device_wait_seconds.inc(waited_s)
        self._metrics.has_device.set(1)
        log.info("device_taken", waited_s=round(waited_s, 3))

    def _give_back(self, engine: MovableEngine) -> None:
        engine.leave_device()
        self._lock.give_back()
        self._metrics.has_device.set(0)
        log.info("device_given_back")
