"""A patch of a server's weights."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry

from gspo_services.learner.weights.delta import encode_delta
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.shared.runtime.clock import MonotonicClock
from tests.support.wire.served_weights import Served
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import in_background, zmq_context

PATIENCE_S = 60.0


class Patched:
    """A weight server, and rollouts that follow it with one real engine, one after the other."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        engine: Engine,
        directory: Path,
        weights: dict[str, torch.Tensor],
        kv_heads: int = 1,
    ) -> None:
        self._kv_heads = kv_heads
        self.served = Served(context)
        self._context = context
        self._engine = engine
        self._directory = directory
        self._changed = asyncio.Event()
        self._generator = torch.Generator().manual_seed(0)
        self.weights = weights
        self.registry = CollectorRegistry()

    @contextlib.asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[WeightSync]:
        self.registry = CollectorRegistry()
        sync = WeightSync(
            context=self._context,
            engine=self._engine,
            work_directory=self._directory / name,
            pause_mode="retract",
            peer=name,
            session="s",
            clock=MonotonicClock(),
            metrics=RolloutMetrics(self.registry),
            retry_s=0.05,
            kv_heads=self._kv_heads,
        )
        sync.on_change(self._changed.set)
        async with in_background(sync.run()):
            yield sync

    def publish(self, version: int) -> None:
        """One element in a hundred has another value, in every tensor."""
        newest = self.served.store.newest
        if newest is not None:
            self.weights = {name: self._stepped(tensor) for name, tensor in self.weights.items()}
        snapshot = snapshot_of(version, self.weights.items())
        self.served.store.add(snapshot, None if newest is None else encode_delta(newest, snapshot))

    def _stepped(self, tensor: torch.Tensor) -> torch.Tensor:
        stepped = tensor.clone()
        chosen = torch.randint(0, tensor.numel(), (max(1, tensor.numel() // 100),), generator=self._generator)
        stepped.view(-1)[chosen] *= 1 + 2**-12
        return stepped

    async def load(self, sync: WeightSync, version: int) -> None:
        sync.announce(version, self.served.endpoint)
        async with asyncio.timeout(PATIENCE_S):
            while sync.policy_version != version:
                await self._changed.wait()
                self._changed.clear()

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("gspo_rollout_weight_updates_total", {"outcome": outcome})


@contextlib.asynccontextmanager
async def patched(
    engine: Engine, directory: Path, weights: dict[str, torch.Tensor], kv_heads: int = 1
) -> AsyncIterator[Patched]:
    async with zmq_context() as context:
        made = Patched(context, engine, directory, weights, kv_heads)
        async with in_background(made.served.authenticator.run(), made.served.server.run()):
            yield made


def counted_updates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods by which engines get weights from now on, in order."""
    calls: list[str] = []

    def counted(name: str, own: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def call(*arguments: Any, **options: Any) -> None:
            calls.append(name)
            await own(*arguments, **options)

        return call

    for name in ("update_weights_from_disk", "patch_weights"):
        monkeypatch.setattr(Engine, name, counted(name, getattr(Engine, name)))
    return calls
