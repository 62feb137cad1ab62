"""A real SGLang server whose parameters are patched in place: bit for bit what a full load gives it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file

from gspo_services.rollout.sglang.client import Engine, EngineError
from gspo_services.rollout.weights import loader
from gspo_services.rollout.weights.patch import write_patch
from gspo_services.shared.weights import PATCHER, patch_file
from tests.integration.conftest import SglangServer
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE
from tests.support.wire.patched import counted_updates, patched
from tests.support.wire.verified import verify_loaded

VERSIONS = 100


@pytest_asyncio.fixture
async def engine(sglang_server: SglangServer) -> AsyncIterator[Engine]:
    """A client; afterwards the server holds its base checkpoint as version 0 again and is not paused."""
    async with Engine(sglang_server.url, vocab_size=TINY_VOCAB_SIZE, chunk_tokens=16) as client:
        yield client
        await client.pause()
        await client.update_weights_from_disk(sglang_server.base, 0)
        await client.resume()


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

    monkeypatch.setattr(loader, "write_patch", write)
    loads = counted_updates(monkeypatch)
    assert PATCHER in (await engine.server_info()).custom_weight_loader
    async with patched(engine, tmp_path, load_file(sglang_server.base / "model.safetensors")) as made:
        async with made.rollout("first") as sync:
            for version in range(1, VERSIONS // 2):
                if version in (20, 30):
                    spoiled.append("value" if version == 20 else "cut")
                made.publish(version)
                await made.load(sync, version)
            assert loads.count("update_weights_from_disk") == 3, "the first version, and the two whose patches were spoiled"
            assert loads.count("patch_weights") == VERSIONS // 2 - 2
            assert (made.outcomes("no_patch"), made.outcomes("failed")) == (2, 0)
        loads.clear()
        async with made.rollout("second") as sync:
            for version in range(VERSIONS // 2, VERSIONS + 1):
                made.publish(version)
                await made.load(sync, version)
            assert loads.count("update_weights_from_disk") == 1
            assert loads.count("patch_weights") == VERSIONS // 2
        newest = made.served.store.newest
        assert newest is not None
        tensors = list(zip(newest.manifest.tensors, newest.tensor_data(), strict=True))
        assert (await verify_loaded(engine, tensors)).ok
        by_patches = await engine.weights_checksums()
        await engine.pause()
        async with made.rollout("third") as sync:
            await made.load(sync, VERSIONS)
        assert loads[-1] == "update_weights_from_disk"
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
