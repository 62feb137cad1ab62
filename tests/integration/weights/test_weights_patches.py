"""A real SGLang server whose parameters are patched in place: bit for bit what a full load gives it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import zmq.asyncio
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file

from gspo_services.learner.weights.delta import encode_delta
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.sglang.client import Engine, EngineError
from gspo_services.rollout.weights import loading
from gspo_services.rollout.weights.patch import write_patch
from gspo_services.rollout.weights.sync import WeightSync
from gspo_services.rollout.weights.verify import verify_loaded
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.weights import ABILITY, patch_file
from tests.integration.conftest import SglangServer
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.wire.served_weights import Served
from tests.support.wire.snapshots import snapshot_of
from tests.support.wire.zmq_ends import in_background, zmq_context

PATIENCE_S = 60.0
VERSIONS = 100


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
        self.served.checksums.known("", "xxh3")
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
        self.served.checksums.renew(newest, snapshot)
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


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client; afterwards the server holds its base checkpoint as version 0 again and is not paused."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
        yield client
        await client.pause()
        await client.update_weights_from_disk(sglang_server.base, 0)
        await client.resume()


@contextlib.asynccontextmanager
async def patched(
    engine: Engine, directory: Path, weights: dict[str, torch.Tensor], kv_heads: int = 1
) -> AsyncIterator[Patched]:
    async with zmq_context() as context:
        made = Patched(context, engine, directory, weights, kv_heads)
        async with in_background(made.served.authenticator.run(), made.served.server.run()):
            yield made


async def test_many_patches_leave_the_engine_with_the_bits_of_a_full_load(
    engine: Engine, sglang_server: SglangServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version is compared by SGLang's own checksums before it is served; two patches are spoiled, one rollout joins."""
    spoiled: list[str] = []

    def write(directory: Path, *rest: Any) -> int:
        num_bytes = write_patch(directory, *rest)
        if spoiled:
            path = directory / patch_file(0)
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content[:-1] if spoiled.pop() == "cut" else content)
        return num_bytes

    monkeypatch.setattr(loading, "write_patch", write)
    loads: list[str] = []
    update = Engine._update

    async def counted(self: Engine, path: Path, load_format: str, *rest: Any) -> None:
        loads.append(load_format)
        await update(self, path, load_format, *rest)

    monkeypatch.setattr(Engine, "_update", counted)
    assert ABILITY in (await engine.server_info()).custom_weight_loader
    async with patched(engine, tmp_path, load_file(sglang_server.base / "model.safetensors")) as made:
        async with made.rollout("first") as sync:
            for version in range(1, VERSIONS // 2):
                if version in (20, 30):
                    spoiled.append("value" if version == 20 else "cut")
                made.publish(version)
                await made.load(sync, version)
            assert loads.count("safetensors") == 3, "the first version, and the two whose patches were spoiled"
            assert loads.count("gspo_patch") == VERSIONS // 2 - 2
            assert (made.outcomes("no_patch"), made.outcomes("failed")) == (2, 0)
        loads.clear()
        async with made.rollout("second") as sync:
            for version in range(VERSIONS // 2, VERSIONS + 1):
                made.publish(version)
                await made.load(sync, version)
            assert loads.count("safetensors") == 1
            assert loads.count("gspo_patch") == VERSIONS // 2
        newest = made.served.store.newest
        assert newest is not None
        tensors = list(zip(newest.manifest.tensors, newest.tensor_data(), strict=True))
        assert (await verify_loaded(engine, tensors)).ok
        by_patches = await engine.weights_checksums()
        await engine.pause()
        async with made.rollout("third") as sync:
            await made.load(sync, VERSIONS)
        assert loads[-1] == "safetensors"
        assert await engine.weights_checksums() == by_patches


async def test_a_patch_that_cannot_be_read_is_an_error_and_the_server_lives(engine: Engine, tmp_path: Path) -> None:
    before = await engine.weights_checksums()
    await engine.pause()
    for content in (b"", b"x" * 100):
        (tmp_path / patch_file(0)).write_bytes(content)
        with pytest.raises(EngineError, match="not patched"):
            await engine.patch_weights(tmp_path, 7)
    with pytest.raises(EngineError, match="not patched"):
        await engine.patch_weights(tmp_path / "nothing", 7)
    assert await engine.weights_checksums() == before
