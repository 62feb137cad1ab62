"""Real SGLang servers of several ranks: served, updated, patched and verified shard by shard; wrong shards are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang import (
    Engine,
    EngineError,
    EngineServer,
    GenerateRequest,
    SamplingParameters,
    ServerOptions,
)
from gspo_services.rollout.weights import loader, require_same_policy
from gspo_services.rollout.weights.file import write_arrays
from gspo_services.rollout.weights.patch import write_patch
from gspo_services.rollout.weights.verify import Verification, Verifier
from gspo_services.shared.weights import INDICES, VALUES, ShardBytes, Spread, patch_file, shards
from tests.support.learner.tiny_model import checkpoint_tensors, reference_logprobs, save_tiny_dense, save_tiny_model
from tests.support.policy.families import save_family
from tests.support.policy.probed import learners_probe
from tests.support.wire.patched import counted_updates, patched
from tests.support.wire.verified import verify_loaded

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(3000), pytest.mark.asyncio(loop_scope="module")]

START_S: Final = 1500.0
"""A start takes half a minute, and far longer on a busy machine."""
VERSIONS: Final = 20
KV_HEADS: Final = 2
LAYER: Final = "model.layers.1"
CLOSE: Final = 2e-5
Sent = list[tuple[TensorInfo, bytes]]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A server of several ranks with the checkpoint ``base`` as version 0."""

    engine: Engine
    server: EngineServer
    base: Path
    model: Any
    spread: Spread

    @property
    def sent(self) -> Sent:
        return checkpoint_tensors(self.base)

    async def put_back(self) -> None:
        await self.engine.pause()
        await self.engine.update_weights_from_disk(self.base, 0)
        await self.engine.resume()


@asynccontextmanager
async def served(directory: Path, save: Any, spread: Spread) -> AsyncIterator[Ranks]:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    model = save(directory / "base")
    options = ServerOptions(
        model_path=directory / "base",
        log_path=directory / "server.log",
        max_total_tokens=4096,
        spread=spread,
        start_timeout_s=START_S,
    )
    async with EngineServer(options) as server, Engine(server.url, chunk_tokens=16) as engine:
        yield Ranks(engine=engine, server=server, base=directory / "base", model=model, spread=spread)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    """Qwen3-MoE over two ranks."""
    async with served(tmp_path_factory.mktemp("two"), save_tiny_model, Spread(tensor=2)) as made:
        yield made


async def sampled(ranks: Ranks, prompt: list[int]) -> tuple[list[int], list[float]]:
    request = GenerateRequest(
        rid="r", input_ids=prompt, sampling=SamplingParameters(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    )
    pieces = [piece async for piece in ranks.engine.generate(request)]
    ids = [int(token) for piece in pieces for token in piece.token_ids]
    return ids, [float(each) for piece in pieces for each in piece.logprobs]


async def require_served(ranks: Ranks, kv_heads: int = KV_HEADS) -> None:
    """All ranks hold the checkpoint, and together they compute what transformers does."""
    assert (await verify_loaded(ranks.engine, ranks.sent, kv_heads)).ok
    assert len(await ranks.engine.weights_checksums()) == ranks.spread.num_ranks
    prompt = [10, 20, 30, 40]
    ids, logprobs = await sampled(ranks, prompt)
    expected = reference_logprobs(ranks.model, prompt + ids)[len(prompt) - 1 :]
    assert np.abs(np.array(logprobs) - expected).max() < CLOSE
    await require_same_policy(ranks.engine, learners_probe(ranks.base))


async def test_a_server_of_two_ranks_follows_twenty_versions_bit_for_bit(
    two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version is compared shard by shard before it is served. One patch lacks a rank's file, one has a wrong value."""
    await require_served(two)
    spoiled: list[str] = []

    def write(directory: Path, *rest: Any) -> int:
        num_bytes = write_patch(directory, *rest)
        if spoiled:
            path = directory / patch_file(1)
            if spoiled.pop() == "absent":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        return num_bytes

    monkeypatch.setattr(loader, "write_patch", write)
    loads = counted_updates(monkeypatch)
    async with patched(two.engine, tmp_path, load_file(two.base / "model.safetensors"), KV_HEADS) as made:
        async with made.rollout("first") as sync:
            for version in range(1, VERSIONS + 1):
                if version in (7, 13):
                    spoiled.append("absent" if version == 7 else "value")
                made.publish(version)
                await made.load(sync, version)
                newest = made.served.store.newest
                assert newest is not None
                tensors = list(zip(newest.manifest.tensors, newest.tensor_data(), strict=True))
                assert (await verify_loaded(two.engine, tensors, KV_HEADS)).ok
            assert (made.outcomes("no_patch"), made.outcomes("failed")) == (2, 0)
        assert loads.count("patch_weights") == VERSIONS - 1
        assert loads.count("update_weights_from_disk") == 3, "the first version, and the two whose patches were spoiled"
        by_patches = await two.engine.weights_checksums()
        async with made.rollout("second") as sync:
            await made.load(sync, VERSIONS)
        assert loads[-1] == "update_weights_from_disk"
        assert await two.engine.weights_checksums() == by_patches
    await two.put_back()
    await require_served(two)


def write_ranks(directory: Path, ranks: list[Mapping[str, bytes]]) -> Path:
    """A patch that gives each rank these parameters whole, in float32."""
    directory.mkdir()
    for rank, parameters in enumerate(ranks):
        arrays: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name, content in parameters.items():
            values = np.frombuffer(content, dtype=np.uint32)
            arrays |= {name + INDICES: [np.arange(len(values), dtype=np.int32)], name + VALUES: [values]}
        write_arrays(directory / patch_file(rank), arrays)
    return directory


def shard_bytes(sent: Sent, spread: Spread) -> list[dict[str, bytes]]:
    ranks = shards([info for info, _ in sent], spread, KV_HEADS)
    data = [content for _, content in sent]
    return [{name: b"".join(ShardBytes(shard, data)) for name, shard in each.items()} for each in ranks]


async def planted(ranks: Ranks, directory: Path, wrong: list[Mapping[str, bytes]]) -> Verification:
    """What verification says when each rank has been given these parameters in place of its own."""
    verifier = Verifier(ranks.engine, KV_HEADS)
    expected = await verifier.expect(ranks.sent)
    assert (await verifier.verify(expected)).ok
    await ranks.engine.pause()
    await ranks.engine.patch_weights(write_ranks(directory, wrong), 1)
    found = await verifier.verify(expected)
    await ranks.put_back()
    assert (await verifier.verify(expected)).ok
    return found


async def test_a_wrong_shard_is_named(two: Ranks, tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.experts.w2_weight"
    content = bytearray(shard_bytes(two.sent, two.spread)[1][name])
    content[5] ^= 1
    found = await planted(two, tmp_path / "patch", [{}, {name: bytes(content)}])
    assert (found.ok, found.mismatched) == (False, [f"rank 1: {name}"])


async def test_two_ranks_with_each_others_shards_are_named(two: Ranks, tmp_path: Path) -> None:
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    own = shard_bytes(two.sent, two.spread)
    found = await planted(two, tmp_path / "patch", [{name: own[1][name]}, {name: own[0][name]}])
    assert found.mismatched == [
        f"rank 0: {name} (it has the shard of rank 1)",
        f"rank 1: {name} (it has the shard of rank 0)",
    ]


async def test_a_rank_that_missed_an_update_is_named(two: Ranks, tmp_path: Path) -> None:
    """Rank 0 has the next version of two parameters. Rank 1 has no file, and fails."""
    changed = [(info, bytes(data)) for info, data in two.sent]
    names = [f"{LAYER}.self_attn.o_proj.weight", "lm_head.weight"]
    for index, (info, data) in enumerate(changed):
        if info.name in names:
            moved = torch.frombuffer(bytearray(data), dtype=torch.float32) * 1.5
            changed[index] = (TensorInfo(*_fields(info, "1" * 64)), moved.numpy().tobytes())
    verifier = Verifier(two.engine, KV_HEADS)
    assert (await verifier.verify(await verifier.expect(two.sent))).ok
    expected = await verifier.expect(changed)
    own = shard_bytes(changed, two.spread)
    directory = write_ranks(tmp_path / "patch", [{name: own[0][name] for name in names}])
    await two.engine.pause()
    with pytest.raises(EngineError, match="the parameters of rank 1 were not patched: FileNotFoundError"):
        await two.engine.patch_weights(directory, 1)
    found = await verifier.verify(expected)
    await two.put_back()
    assert sorted(found.mismatched) == [f"rank 1: {name} (it has the shard of the version before)" for name in sorted(names)]


def _fields(info: TensorInfo, digest: str) -> tuple[Any, ...]:
    return info.name, info.dtype, info.shape, info.offset, info.num_bytes, digest


async def test_the_end_of_one_rank_is_the_end_of_the_server(tmp_path: Path) -> None:
    async with served(tmp_path, save_tiny_model, Spread(tensor=2)) as made:
        [victim] = [
            each for each in psutil.Process(made.server.pid).children() if "TP1" in " ".join([each.name(), *each.cmdline()])
        ]
        victim.kill()
        async with asyncio.timeout(60):
            assert "the SGLang server ended with status" in await made.server.wait_dead()


@pytest.mark.parametrize(
    ("save", "spread", "heads"),
    [
        pytest.param(save_tiny_model, Spread(tensor=2, expert=2), 2, id="qwen3-moe, whole experts"),
        pytest.param(save_tiny_model, Spread(data=2), 2, id="qwen3-moe, two copies"),
        pytest.param(partial(save_tiny_dense, family="qwen3", kv_heads=2), Spread(tensor=2), 2, id="qwen3"),
        pytest.param(
            partial(save_tiny_dense, family="llama", kv_heads=1), Spread(tensor=2), 1, id="llama, one head of keys"
        ),
        pytest.param(partial(save_family, kind="deepseek_v3"), Spread(tensor=2), 4, id="deepseek-v3"),
        pytest.param(partial(save_family, kind="deepseek_v3"), Spread(tensor=2, expert=2), 4, id="deepseek-v3, experts"),
        pytest.param(partial(save_family, kind="glm4_moe"), Spread(tensor=2), 2, id="glm-4.5"),
        pytest.param(partial(save_family, kind="glm4_moe_lite"), Spread(tensor=2), 4, id="glm-4.7-flash"),
        pytest.param(partial(save_family, kind="mixtral"), Spread(tensor=2, expert=2), 2, id="mixtral, experts"),
        pytest.param(partial(save_family, kind="mixtral"), Spread(tensor=2), 2, id="mixtral"),
    ],
)
async def test_other_shapes_and_spreads_are_served_and_patched(
    save: Any, spread: Spread, heads: int, tmp_path: Path
) -> None:
    async with served(tmp_path, save, spread) as made:
        await require_served(made, heads)
        async with patched(made.engine, tmp_path, load_file(made.base / "model.safetensors"), heads) as versions:
            async with versions.rollout("first") as sync:
                for version in range(1, 4):
                    versions.publish(version)
                    await versions.load(sync, version)
            assert (versions.outcomes("no_patch") or 0, versions.outcomes("failed")) == (0, 0)
