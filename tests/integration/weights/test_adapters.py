"""Adapters of a real learner in a real SGLang server: log-probs, versions of tokens, verification, faults.

A server with slots for adapters and a learner of their own take half a minute: ``make test-ranks``.
"""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs
from safetensors.torch import save_file

from gspo_protocol.digests import version_digest
from gspo_protocol.messages import AdapterInfo
from gspo_services.learner.weights.adapter_copy import PublishedBase
from gspo_services.learner.weights.snapshot import Snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.rollout.sglang.client import Engine, EngineError
from gspo_services.rollout.sglang.server_info import ServerInfo
from gspo_services.shared.runtime.errors import ServiceError, flatten
from tests.support.engines.adapter_following import (
    PLAN,
    PROMPT,
    Following,
    Learnt,
    collect,
    following,
    joined,
    learn_and_serve,
    tensors_of,
)
from tests.support.engines.adapter_worker import NUM_VERSIONS
from tests.support.engines.prompt_logprobs import prompt_logprobs
from tests.support.learner.tiny_model import TINY_VOCAB_SIZE, reference_logprobs
from tests.support.wire.zmq_ends import PATIENCE_S

pytestmark = pytest.mark.ranks
TOLERANCE = 2e-5
CAUGHT = 100 * TOLERANCE
LONG = 300
MATRIX = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
Plant = Callable[[Path], None]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def learnt(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Learnt]:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    async with learn_and_serve(tmp_path_factory.mktemp("adapters")) as found:
        yield found


def require_log_probs(learnt: Learnt, token_ids: list[int], logprobs: object, versions: list[int]) -> None:
    """Each token has the log-prob that the merged weights of its version give it."""
    for version in set(versions):
        mine = np.array(versions) == version
        expected = reference_logprobs(learnt.model(version), PROMPT + token_ids)[len(PROMPT) - 1 :]
        assert np.abs(np.asarray(logprobs) - expected)[mine].max() < TOLERANCE


async def names(engine: Engine) -> list[int]:
    """The versions whose adapters the server has."""
    return sorted(int(name.rpartition("-v")[2]) for name in await engine.adapters.names())


async def test_an_adapter_and_the_merged_weights_have_the_same_log_probs(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        for version in range(1, NUM_VERSIONS + 1):
            await follow.serve(version)
            token_ids, logprobs, versions = joined(await collect(follow.engine, f"v{version}", 40))
            assert set(versions) == {version}
            require_log_probs(learnt, token_ids, logprobs, versions)
            assert await names(follow.engine) == [version]
        other = reference_logprobs(learnt.model(1), PROMPT + token_ids)[len(PROMPT) - 1 :]
        assert np.abs(logprobs - other).max() > CAUGHT, "the versions hardly differ"
        assert follow.outcomes("loaded") == NUM_VERSIONS
        (name,) = await follow.engine.adapters.names()
        adapted = np.array(await follow.engine.adapters.prompt_logprobs(name, PROMPT + token_ids))
        # The other way: the same server loads the merged weights, and then those that it began with.
        try:
            await update(follow.engine, learnt, learnt.work / f"model-{NUM_VERSIONS}", 7)
            assert np.abs(await prompt_logprobs(learnt.url, PROMPT + token_ids) - adapted).max() < TOLERANCE
        finally:
            await update(follow.engine, learnt, learnt.work / "model", 0)


async def update(engine: Engine, learnt: Learnt, model: Path, version: int) -> None:
    await engine.pause()
    await engine.update_weights_from_disk(model, version)
    await engine.resume()


def test_a_version_is_the_matrices_of_attention_and_far_smaller_than_the_model(learnt: Learnt) -> None:
    manifest = learnt.adapters[2].manifest
    assert manifest.num_bytes == 4 * 2 * PLAN.rank * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    assert manifest.num_bytes < 1_000_000
    assert manifest.num_bytes < learnt.merged[2].manifest.num_bytes / 20
    assert isinstance(manifest.adapter, AdapterInfo)
    assert (manifest.adapter.base_digest, len(manifest.adapter.probe_logprobs)) == (learnt.base.manifest.digest, 31)


async def test_a_generation_under_way_goes_on_with_the_next_adapter(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        await follow.serve(1)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(collect(follow.engine, "long", LONG, begun := asyncio.Event()), name="answer")
            await begun.wait()
            await follow.serve(2)
            assert await names(follow.engine) == [2]
        token_ids, logprobs, versions = joined(answer.result())
        assert len(token_ids) == LONG
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        require_log_probs(learnt, token_ids, logprobs, versions)


async def test_in_place_a_generation_ends_with_its_adapter_while_slots_last(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path, replace(PLAN, mode="in_place")) as follow:
        await follow.serve(1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(collect(follow.engine, "first", LONG, begun := asyncio.Event()), name="first")
            await begun.wait()
            await follow.serve(2)
            second = tasks.create_task(collect(follow.engine, "second", 20), name="second")
            assert await names(follow.engine) == [1, 2]
        assert (set(joined(first.result())[2]), set(joined(second.result())[2])) == ({1}, {2})
        async with asyncio.TaskGroup() as tasks:
            oldest = tasks.create_task(collect(follow.engine, "oldest", LONG, begun := asyncio.Event()), name="oldest")
            await begun.wait()
            follow.publish(learnt.renumbered(1, 4))
            await follow.served_one()
            # Two slots are taken, and the version that comes wants the one of version 2.
            follow.publish(learnt.renumbered(3, 5))
            await follow.served_one()
        assert set(joined(oldest.result())[2]) == {2, 4}
        assert await names(follow.engine) == [4, 5], "the rest of it was asked for with version 4"


def planted(follow: Following, before: Plant, after: Plant | None = None) -> None:
    """Change the adapter's files once they were checked, and change them back when SGLang has read them (``after``)."""
    load = follow.engine.adapters.load

    async def load_planted(name: str, path: Path) -> None:
        before(path)
        await load(name, path)
        if after is not None:
            after(path)

    follow.engine.adapters.load = load_planted  # type: ignore[method-assign]


def one_element(path: Path) -> None:
    shutil.copy(path / "adapter_model.safetensors", path.parent / "kept")
    content = bytearray((path / "adapter_model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    place = begin + json.loads(content[8:begin])[MATRIX]["data_offsets"][0]
    content[place + 4 * 5] ^= 1
    (path / "adapter_model.safetensors").write_bytes(content)


def as_before(path: Path) -> None:
    shutil.move(path.parent / "kept", path / "adapter_model.safetensors")


def of_version(learnt: Learnt, version: int) -> Plant:
    def change(path: Path) -> None:
        shutil.copy(path / "adapter_model.safetensors", path.parent / "kept")
        save_file(tensors_of(learnt.adapters[version]), path / "adapter_model.safetensors")

    return change


async def not_served(follow: Following, version: int, snapshot: Snapshot | None = None) -> str:
    """Publish a version that must not be served. Returns what is wrong with it."""
    follow.changed.clear()
    follow.publish(snapshot or follow.learnt.adapters[version])
    error = (await follow.report()).error
    assert follow.sync.policy_version == version - 1, "the former one is served"
    assert follow.outcomes("failed") == 1
    assert version not in await names(follow.engine)
    return error


async def test_an_element_that_changed_on_disk_is_named(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        planted(follow, one_element)
        assert f"policy version 1: tensor {MATRIX} in " in await not_served(follow, 1)
        assert f"tensor {MATRIX}" in follow.sync.quarantined
        assert not follow.sync.may_generate.is_set()


async def test_an_element_that_changed_in_the_engine_is_named(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        await follow.serve(1)
        planted(follow, one_element, as_before)
        error = await not_served(follow, 2)
        assert error.endswith("1 of 8 matrices in the engine differ from what was loaded: 1.qkv_proj.lora_B")
        assert follow.sync.may_generate.is_set()
        assert set(joined(await collect(follow.engine, "goes-on", 8))[2]) == {1}


async def test_the_adapter_of_the_version_before_is_recognised(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        await follow.serve(1)
        await follow.serve(2)
        planted(follow, of_version(learnt, 2), as_before)
        of_3 = learnt.adapters[3]
        assert of_3.manifest.adapter is not None
        unprobed = structs.replace(of_3.manifest, adapter=structs.replace(of_3.manifest.adapter, probe_logprobs=[]))
        error = await not_served(follow, 3, Snapshot(manifest=unprobed, weights=of_3.weights))
        assert "0.qkv_proj.lora_A (it is that of version 2)" in error


async def test_an_engine_that_does_not_report_slots_is_probed(learnt: Learnt, tmp_path: Path) -> None:
    """SGLang as it is says nothing of its adapters."""

    async with following(learnt, tmp_path) as follow:
        server_info = follow.engine.server_info

        async def as_sglang_is() -> ServerInfo:
            return structs.replace(await server_info(), custom_weight_loader=[])

        follow.engine.server_info = as_sglang_is  # type: ignore[method-assign]
        await follow.serve(1)
        planted(follow, of_version(learnt, 3), as_before)
        error = await not_served(follow, 2)
        assert "policy version 2: with its adapter the engine gives token" in error
        assert "at most 0.0001 is rounding" in error


async def refused(learnt: Learnt, directory: Path, snapshot: Snapshot, *, base: dict[str, object] | None = None) -> str:
    """Publish a version that no rollout with these settings or this model may serve. Returns why it ended."""
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the end of the conversation is what is tested
        async with following(learnt, directory) as follow:
            if base is not None:
                follow.served.server.keep_base(PublishedBase(copy_weights(base.items())))
            follow.publish(snapshot)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.Event().wait()
    (error,) = flatten(caught.value)
    assert isinstance(error, ServiceError)
    return str(error)


async def test_an_adapter_of_another_model_is_refused_with_both_digests(learnt: Learnt, tmp_path: Path) -> None:
    other = {name: tensor + 1e-6 * (name == "model.norm.weight") for name, tensor in tensors_of(learnt.base).items()}
    error = await refused(learnt, tmp_path, learnt.adapters[1], base=other)
    found = re.search(
        r"its parameters have digest (\w{32}), those of the learner's model (\w{32}); 1 differ, such as (.*); s", error
    )
    assert found is not None, error
    assert found[1] != found[2]
    assert found[3] == "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "said"), [({"rank": 8}, "has rank 8, alpha 8 and"), ({"alpha": 16.0}, "has rank 4, alpha 16 and")]
)
async def test_an_adapter_of_another_rank_or_scale_is_refused(
    learnt: Learnt, tmp_path: Path, changes: dict[str, float], said: str
) -> None:
    manifest = learnt.adapters[1].manifest
    assert manifest.adapter is not None
    info = structs.replace(manifest.adapter, **changes)
    wrong = structs.replace(manifest, adapter=info, digest=version_digest(manifest.tensors, info))
    error = await refused(learnt, tmp_path, Snapshot(manifest=wrong, weights=learnt.adapters[1].weights))
    assert said in error
    assert "and [lora] says rank 4, alpha 8 and" in error


async def test_a_version_with_all_weights_is_refused_where_adapters_are_expected(learnt: Learnt, tmp_path: Path) -> None:
    error = await refused(learnt, tmp_path, learnt.merged[1])
    assert 'lora.publish is "adapter" and policy version 1 has all weights' in error


async def test_a_rollout_that_starts_again_loads_its_copy_and_unloads_what_was_left(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:
        await follow.serve(2)
        (former,) = await follow.engine.adapters.names()
    async with following(learnt, tmp_path) as follow:
        await follow.serve(2)
        assert follow.served.count("weight_bytes_sent") == 0, "the copy of the former process is taken over"
        assert set(joined(await collect(follow.engine, "again", 8))[2]) == {2}
        (name,) = await follow.engine.adapters.names()
        assert name != former


async def test_versions_that_come_during_a_load_are_caught_up_with(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow:

        def publish_more(_: Path) -> None:
            if follow.sync.policy_version == 0:
                follow.publish(learnt.adapters[2])
                follow.publish(learnt.adapters[3])

        planted(follow, publish_more)
        await follow.serve(1)
        await follow.served_one()
        assert follow.sync.policy_version == 3
        assert await names(follow.engine) == [3]


async def test_a_server_that_somebody_else_updates_gives_no_more_tokens(learnt: Learnt, tmp_path: Path) -> None:
    async with following(learnt, tmp_path) as follow, Engine(learnt.url, vocab_size=TINY_VOCAB_SIZE) as other:
        await follow.serve(1)
        try:
            await update(other, learnt, learnt.work / "model", 9)
            with pytest.raises(
                EngineError, match="the server's own weights are of version \\[9\\], and the adapter of version 1"
            ):
                await collect(follow.engine, "updated", 8)
        finally:
            await update(other, learnt, learnt.work / "model", 0)
