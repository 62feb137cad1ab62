"""A WeightSync that follows a real weight server, with a scripted engine behind it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq.asyncio
from msgspec import structs
from prometheus_client import CollectorRegistry

from gspo_protocol.messages import Probe
from gspo_services.learner.weights.delta import encode_delta
from gspo_services.learner.weights.snapshot import Delta
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang import Engine
from gspo_services.rollout.weights.colocate import EngineDevice
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.shared.colocate import DeviceLock
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.wire.served_weights import Served, weights
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import PATIENCE_S, in_background, zmq_context

RETRY_S = 0.05


class Following:
    """A WeightSync between a real weight server and a scripted engine."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path, lock: DeviceLock | None = None) -> None:
        self.served = Served(context)
        self.engine = ScriptedEngine()
        self.work_directory = directory / "work"
        self.registry = CollectorRegistry()
        clock, metrics = MonotonicClock(), RolloutMetrics(self.registry)
        engine: Engine = self.engine  # type: ignore[assignment]
        self.sync = WeightSync(
            context=context,
            engine=engine,
            work_directory=self.work_directory,
            pause_mode="retract",
            peer="rollout-0",
            session="s",
            clock=clock,
            metrics=metrics,
            retry_s=RETRY_S,
            device=EngineDevice(engine, lock, clock=clock, metrics=metrics, poll_s=0.001),
        )
        # A file for each tensor: the engine loads the files with changed tensors.
        self.sync._replica = Replica(self.work_directory, shard_bytes=1)
        self.probe: Probe | None = None
        """Of the versions that are published from now on."""
        self._changed = asyncio.Event()
        self.sync.on_change(self._changed.set)

    def publish(self, version: int) -> None:
        self.newest = self.tensors(version)
        snapshot = snapshot_of(version, self.tensors(version).items())
        manifest = structs.replace(snapshot.manifest, probe=self.probe)
        self.served.store.add(dataclasses.replace(snapshot, manifest=manifest))
        self.sync.announce(version, self.served.endpoint)

    def step(self, version: int, *changed: str, damage: bool = False) -> None:
        """Publish the newest version with another value in each of the tensors ``changed``, and the delta to it."""
        newest = self.served.store.newest
        assert newest is not None
        self.newest = {name: tensor.clone() for name, tensor in self.newest.items()}
        for name in changed:
            self.newest[name].view(-1)[0] += 1
        snapshot = snapshot_of(version, self.newest.items())
        snapshot = dataclasses.replace(snapshot, manifest=structs.replace(snapshot.manifest, probe=self.probe))
        delta = encode_delta(newest, snapshot)
        assert delta is not None
        if damage:
            delta = Delta(manifest=delta.manifest, data=delta.data ^ np.uint8(255))
        self.served.store.add(snapshot, delta)
        self.sync.announce(version, self.served.endpoint)

    def holds_newest(self) -> bool:
        """Whether the engine has every tensor of the last published version."""
        return {name: data for name, (_, data) in self.engine.loaded.items()} == {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in self.newest.items()
        }

    @staticmethod
    def tensors(version: int) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in weights(version).items() if "experts" not in name}

    async def changed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._changed.wait()
        self._changed.clear()

    async def counted(self, name: str, number: float) -> None:
        """Wait until the server has counted this many."""
        async with asyncio.timeout(PATIENCE_S):
            while self.served.count(name) < number:  # noqa: ASYNC110 - what it waits for is in another task's counter
                await asyncio.sleep(0.005)

    async def three_versions_of_which_two_come_during_a_load(self) -> None:
        """Version 2, and 3 and 4 while it is loaded; each changes another tensor. Returns when the newest is served."""

        def publish_more(_: dict[str, Any]) -> None:
            self.engine.damage = lambda _: None
            self.step(3, "model.layers.0.input_layernorm.weight")
            self.step(4, "model.embed_tokens.weight")

        self.engine.damage = publish_more
        self.step(2, "model.norm.weight")
        await self.changed()
        await self.changed()

    def fetches(self, kind: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_fetches_total", {"kind": kind})

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_updates_total", {"outcome": outcome})


@contextlib.asynccontextmanager
async def following(directory: Path, lock: DeviceLock | None = None) -> AsyncIterator[Following]:
    """``lock``: of a device that others use, too."""
    async with zmq_context() as context:
        follow = Following(context, directory, lock)
        async with in_background(follow.served.authenticator.run(), follow.served.server.run(), follow.sync.run()):
            yield follow
