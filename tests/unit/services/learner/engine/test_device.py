"""The learner's shared device: its states are on the device only while it has the lock."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gspo_services.learner.engine.colocate import ColocatedDevice
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.shared.colocate import DEVICE_POLL_S, LOCK_FILE, DeviceLock
from gspo_services.shared.runtime.telemetry import Health
from tests.support.clocks import VirtualClock


class Moving:
    """An engine that notes who has the device when it moves."""

    def __init__(self, lock: DeviceLock) -> None:
        self.moves: list[tuple[str, bool]] = []
        self._lock = lock

    def leave_device(self) -> None:
        self.moves.append(("leave", self._lock.held))

    def return_to_device(self) -> None:
        self.moves.append(("return", self._lock.held))


class Shared:
    """A learner's end of a shared device, beside a rollout that has the device when a test begins."""

    def __init__(self, directory: Path) -> None:
        self.rollout = DeviceLock(directory / LOCK_FILE, "rollout-0")
        self.lock = DeviceLock(directory / LOCK_FILE, "learner")
        self.engine = Moving(self.lock)
        self.clock = VirtualClock()
        self.registry = CollectorRegistry()
        self.health = Health(self.clock, max_quiet_s=10.0)
        self.pauses = 0
        assert self.rollout.try_take()
        self.device = ColocatedDevice(
            self.lock, clock=self.clock, health=self.health, metrics=LearnerMetrics(self.registry), pause=self.pause
        )

    def pause(self, seconds: float) -> None:
        """The rollout gives the device back in the learner's third wait."""
        assert self.lock.holder == "rollout-0"
        self.pauses += 1
        self.clock.advance(seconds)
        if self.pauses == 3:
            self.rollout.give_back()

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"gspo_learner_{name}")


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_the_learner_waits_for_the_device_and_leaves_it_with_all_states(shared: Shared) -> None:
    shared.device.begin(lambda: False)
    assert (shared.pauses, shared.lock.held, shared.sample("has_device")) == (3, True, 1)
    shared.device.made(shared.engine)
    assert (shared.lock.held, shared.sample("has_device")) == (False, 0)
    with shared.device.held():
        assert shared.lock.held
        assert shared.engine.moves == [("leave", True), ("return", True)]
        assert not shared.rollout.try_take()
    assert shared.engine.moves[2:] == [("leave", True)]
    assert shared.rollout.try_take()
    assert shared.sample("device_acquired_total") == 2
    assert shared.sample("device_wait_seconds_total") == pytest.approx(3 * DEVICE_POLL_S)


def test_a_learner_that_waits_is_ready_once_it_has_an_engine(shared: Shared) -> None:
    shared.device.begin(lambda: False)
    assert shared.health.ready() == (False, "waits for the device, which rollout-0 has")
    shared.device.made(shared.engine)
    assert shared.rollout.try_take()
    shared.pauses = 0
    with shared.device.held():
        assert shared.health.ready()[0]


def test_an_error_in_the_turn_keeps_the_device_until_the_process_ends(shared: Shared) -> None:
    shared.device.begin(lambda: False)
    shared.device.made(shared.engine)
    with pytest.raises(ArithmeticError), shared.device.held():
        raise ArithmeticError
    assert shared.engine.moves[-1] == ("return", True)
    assert not shared.rollout.try_take()


def test_a_learner_that_is_stopped_before_its_first_turn_takes_none(shared: Shared) -> None:
    shared.device.begin(lambda: shared.pauses == 2)
    assert (shared.pauses, shared.lock.held) == (2, False)
