"""A learner that shares its device: it computes while it has the device, and waits for batches without it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.broker.port import Answer
from gspo_services.learner.metrics import LearnerMetrics
from gspo_services.learner.service import LearnerService
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.runtime.telemetry import Health
from gspo_services.shared.settings.sections import BatchSection, Learner, Run, Settings
from tests.support.learner.scripted_broker import ScriptedBroker
from tests.support.learner.serving_bigram import ServingBigram


class NotedDevice:
    """A device that is none, and what happens while it is held."""

    def __init__(self) -> None:
        self.has_device = False
        self.said: list[str] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        self.has_device = True
        self.said.append("held:")
        yield
        self.has_device = False

    def say(self, what: str) -> None:
        """What needs the device."""
        assert self.has_device, f"{what} without the device"
        self.said[-1] += f" {what}"


class MovedBigram(ServingBigram):
    """An engine that can only be used while the device is held."""

    def __init__(self, device: NotedDevice) -> None:
        super().__init__()
        self._device = device

    def train_mini_batch(self, *arguments: Any, **options: Any) -> Any:
        self._device.say("step")
        return super().train_mini_batch(*arguments, **options)

    def published(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        self._device.say("copy")
        return super().published(dtype)

    def copy_state(self, directory: Path) -> Any:
        self._device.say("save")
        return super().copy_state(directory)


class OutsideBroker(ScriptedBroker):
    """Is waited for without the device only."""

    def __init__(self, stop: threading.Event, device: NotedDevice) -> None:
        super().__init__(stop, num_batches=2)
        self._device = device

    def wait_welcome(self, timeout_s: float) -> Any:
        assert not self._device.has_device
        return super().wait_welcome(timeout_s)

    def take(self, timeout_s: float) -> Answer | None:
        assert not self._device.has_device
        return super().take(timeout_s)


def run(directory: Path) -> list[str]:
    """What the device was used for in two batches."""
    settings = Settings(
        run=Run(directory=directory),
        batch=BatchSection(group_size=2, groups_per_batch=4, mini_batches=2),
        learner=Learner(checkpoint_every_batches=2),
    )
    clock, stop, device = MonotonicClock(), threading.Event(), NotedDevice()
    LearnerService(
        settings,
        MovedBigram(device),  # type: ignore[arg-type]
        OutsideBroker(stop, device),
        clock=clock,
        health=Health(clock, 60.0),
        metrics=LearnerMetrics(CollectorRegistry()),
        stop=stop,
        device=device,
    ).run()
    assert not device.has_device
    return device.said


def test_each_batch_is_trained_published_and_saved_in_one_turn_and_a_stop_has_its_own(tmp_path: Path) -> None:
    # The layout of versions is found before the first copy.
    assert run(tmp_path) == ["held: copy copy", "held: step step copy", "held: step step copy save", "held:"]
