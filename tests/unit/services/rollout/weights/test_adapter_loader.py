"""Which servers, models and settings adapters are loaded into; what an engine does with them is in
tests/integration/weights/test_adapters.py."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from msgspec import structs

from gspo.model.serving_layout import ServedParameter
from gspo_protocol.digests import tensor_digest
from gspo_services.learner.weights.adapter_copy import PublishedBase, copy_adapter
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.rollout.sglang.client import EngineError
from gspo_services.rollout.sglang.engine_adapters import Adapter
from gspo_services.rollout.sglang.server_info import ServerInfo
from gspo_services.rollout.weights.adapter_loader import AdapterLoader, AdapterPlan, BaseUnknownError, lora_arguments
from gspo_services.rollout.weights.adapter_parts import adapter_parts
from gspo_services.rollout.weights.loader import VerificationError
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.verify import Verifier
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import load_settings
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.wire.snapshots import bytes_of

BASE = {"model.embed_tokens.weight": torch.ones(64, 2), "lm_head.weight": torch.ones(64, 2)}
PLAN = AdapterPlan(rank=2, alpha=4.0, slots=2, tolerance=1e-4, mode="retract")
INFO: dict[str, Any] = {
    "version": "0.5.23", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "/m", "enable_lora": True,
    "max_lora_rank": 2, "max_loras_per_batch": 3, "lora_target_modules": ["o_proj", "v_proj", "k_proj", "q_proj"],
}  # fmt: skip


class Adapters:
    """What a server that takes everything does with adapters."""

    def __init__(self) -> None:
        self.loaded = ["gspo-00-1-v3", "somebody-elses"]
        self.calls: list[str] = []
        self.refuse = ""
        self.used: set[str] = set()
        self.stuck: set[str] = set()

    async def load(self, name: str, path: Path) -> None:
        assert sorted(os.listdir(path)) == ["adapter_config.json", "adapter_model.safetensors"]
        if self.refuse:
            raise EngineError(self.refuse)
        self.loaded.append(name)

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)
        self.calls.append(f"unload {name.rpartition('-')[2]}")

    async def names(self) -> list[str]:
        return list(self.loaded)

    async def prompt_logprobs(self, name: str, token_ids: list[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    def serve(self, adapters: Mapping[str, Adapter]) -> None:
        self.calls += [f"serve {name}v{adapter.version}" for name, adapter in adapters.items()]

    def cut(self, name: str) -> bool:
        self.used.discard(name)
        self.calls.append(f"cut {name.rpartition('-')[2]}")
        return name not in self.stuck


def an_engine(**changes: Any) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.adapters = Adapters()
    engine.info = ServerInfo(**(INFO | changes))
    engine.ranks = [PublishedBase(copy_weights(BASE.items()))._compute("cpu")]
    engine.said_version = 7
    return engine


def published(version: int, rank: int = 2, **changes: Any) -> Snapshot:
    base = PublishedBase(copy_weights(BASE.items()))
    matrices = [
        ServedParameter.alone(
            f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_{side}.weight", torch.full(shape, float(version))
        )
        for part in "qkvo"
        for side, shape in (("A", (rank, 3)), ("B", (3, rank)))
    ]
    probe = ([1, 2, 3], [-0.5, -0.5])
    return build_snapshot(
        version, copy_adapter(matrices, **({"rank": 2, "alpha": 4.0, "base": base, "probe": probe} | changes))
    )


def replica_of(snapshot: Snapshot, checksums: dict[str, str] | None = None) -> Replica:
    """A replica that has this version, and was told what an engine must report."""
    replica = Replica()
    landing = replica.landing(snapshot.manifest)
    landing.put(0, memoryview(bytes_of(snapshot)))
    known = PublishedBase(copy_weights(BASE.items()))._compute("cpu") if checksums is None else checksums
    replica.replace(structs.replace(snapshot.manifest, checksums=known), landing)  # type: ignore[arg-type]
    return replica


@pytest.fixture
def engine() -> ScriptedEngine:
    return an_engine()


def loader(engine: ScriptedEngine, directory: Path, plan: AdapterPlan = PLAN) -> AdapterLoader:
    return AdapterLoader(engine, Verifier(engine), directory, plan)  # type: ignore[arg-type]


async def test_an_adapter_is_loaded_and_only_then_served_and_the_former_one_unloaded(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    adapters = loader(engine, tmp_path)
    for version in (4, 5):
        loaded = await adapters.load(replica_of(published(version)))
        (adapter,) = loaded.values()
        assert (adapter.version, adapter.base_version) == (version, 7)
        adapters.serve(loaded)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", "serve v4", "serve v5", "cut v4", "unload v4"]
    assert engine.adapters.loaded == ["somebody-elses", adapter.name]
    assert list((tmp_path / "loaded").iterdir()) == [], "SGLang must not find the files of an unloaded adapter"


async def test_in_place_an_adapter_in_use_stays_until_its_slot_is_wanted(engine: ScriptedEngine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path, AdapterPlan(rank=2, alpha=4.0, slots=2, tolerance=1e-4, mode="in_place"))
    for version in (4, 5, 6):
        loaded = await adapters.load(replica_of(published(version)))
        (adapter,) = loaded.values()
        engine.adapters.used.add(adapter.name)
        adapters.serve(loaded)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", "serve v4", "serve v5", "cut v4", "unload v4", "serve v6"]


async def test_in_place_nothing_is_cut_while_there_are_slots(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.info = ServerInfo(**(INFO | {"max_loras_per_batch": 9}))
    adapters = loader(engine, tmp_path, AdapterPlan(rank=2, alpha=4.0, slots=8, tolerance=1e-4, mode="in_place"))
    for version in range(4, 9):
        loaded = await adapters.load(replica_of(published(version)))
        (adapter,) = loaded.values()
        engine.adapters.used.add(adapter.name)
        adapters.serve(loaded)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", *(f"serve v{version}" for version in range(4, 9))]


async def test_an_adapter_whose_requests_do_not_end_is_unloaded_with_a_later_version(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    adapters = loader(engine, tmp_path)
    for version in (4, 5, 6):
        loaded = await adapters.load(replica_of(published(version)))
        (adapter,) = loaded.values()
        engine.adapters.stuck = {adapter.name} if version == 4 else engine.adapters.stuck if version == 5 else set()
        adapters.serve(loaded)
        await adapters.retire_former()
    assert [call for call in engine.adapters.calls if not call.startswith("cut")] == [
        "unload v3", "serve v4", "serve v5", "serve v6", "unload v4", "unload v5"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_lora": False}, "without --enable-lora"),
        ({"max_lora_rank": 1}, "with --max-lora-rank 1"),
        ({"max_loras_per_batch": 2}, "with --max-loras-per-batch 2"),
        ({"lora_target_modules": ["q_proj"]}, "with --lora-target-modules q_proj"),
        ({"tp_size": 2}, "the SGLang server has several ranks"),
    ],
)
async def test_a_server_that_cannot_hold_the_adapters_is_named_with_what_it_lacks(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        await loader(an_engine(**changes), tmp_path).load(replica_of(published(4)))
    assert said in str(caught.value)
    wanted = "--enable-lora --max-lora-rank 2 --max-loras-per-batch 3 --lora-target-modules q_proj k_proj v_proj o_proj"
    assert wanted == " ".join(lora_arguments(2, 2))
    assert wanted in str(caught.value) or changes == {"tp_size": 2}


async def test_a_server_that_says_all_modules_can_hold_any(tmp_path: Path) -> None:
    loaded = await loader(an_engine(lora_target_modules=["all"]), tmp_path).load(replica_of(published(4)))
    assert [adapter.version for adapter in loaded.values()] == [4]


async def test_a_server_without_a_version_of_its_own_is_refused(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "weight_version", AsyncMock(return_value=None))
    with pytest.raises(ServiceError, match="without a number as --weight-version; start it with 0"):
        await loader(engine, tmp_path).load(replica_of(published(4)))


async def test_nothing_is_loaded_before_the_learner_has_said_what_its_model_is(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    adapters = loader(engine, tmp_path)
    with pytest.raises(BaseUnknownError):
        await adapters.load(replica_of(published(4), checksums={}))
    assert adapters.wants_checksums
    await adapters.load(replica_of(published(4)))
    assert not adapters.wants_checksums
    await adapters.load(replica_of(published(5), checksums={}))


async def test_an_engine_that_reports_no_checksums_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServiceError, match="cannot be verified: no checksum is known for an engine on 'xpu'"):
        await loader(an_engine(device="xpu"), tmp_path).load(replica_of(published(4), checksums={}))
    silent = an_engine()
    monkeypatch.setattr(silent, "weights_checksums", AsyncMock(side_effect=EngineError("404: no such endpoint")))
    with pytest.raises(EngineError, match="no such endpoint"):
        await loader(silent, tmp_path).load(replica_of(published(4), checksums={}))


async def test_a_learner_that_goes_on_with_another_model_is_asked_what_it_is(engine: ScriptedEngine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path)
    await adapters.load(replica_of(published(4)))
    other = PublishedBase(copy_weights({**BASE, "lm_head.weight": torch.zeros(64, 2)}.items()))
    with pytest.raises(BaseUnknownError):
        await adapters.load(replica_of(published(5, base=other), checksums={}))
    with pytest.raises(ServiceError, match=r"1 differ, such as lm_head\.weight"):
        await adapters.load(replica_of(published(5, base=other), checksums=other._compute("cpu")))


@pytest.mark.parametrize(("absent", "is_fine"), [("lm_head.weight", True), ("model.embed_tokens.weight", False)])
async def test_only_a_head_that_is_the_embedding_may_be_missing(
    engine: ScriptedEngine, tmp_path: Path, absent: str, is_fine: bool
) -> None:
    engine.ranks = [{name: value for name, value in engine.ranks[0].items() if name != absent}]
    try:
        await loader(engine, tmp_path).load(replica_of(published(4)))
    except ServiceError as error:
        assert not is_fine
        assert absent in str(error)
    else:
        assert is_fine


async def test_an_adapter_that_the_server_refuses_leaves_nothing(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.adapters.refuse = "no room"
    with pytest.raises(EngineError, match="no room"):
        await loader(engine, tmp_path).load(replica_of(published(4)))
    assert list((tmp_path / "loaded").iterdir()) == []


async def test_an_adapter_that_moves_log_probs_otherwise_is_unloaded(engine: ScriptedEngine, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"gives token 2 of the probe the log-prob -0.50000, the learner -0.50100"):
        await loader(engine, tmp_path).load(replica_of(published(4, probe=([1, 2, 3], [-0.5, -0.501]))))
    assert engine.adapters.loaded == ["somebody-elses"]
    for nothing in (float("nan"), float("inf")):
        with pytest.raises(VerificationError, match="the mean difference is"):
            await loader(engine, tmp_path).load(replica_of(published(4, probe=([1, 2, 3], [-0.5, nothing]))))


async def test_a_server_that_reports_slots_must_report_this_one(tmp_path: Path) -> None:
    engine = an_engine(custom_weight_loader=["gspo_services.shared.sglang_cpu.lora_slots.slots"])

    async def nothing(name: str) -> dict[str, str]:
        return {}

    engine.adapters.slots = nothing
    with pytest.raises(VerificationError, match="4 of 4 matrices in the engine differ"):
        await loader(engine, tmp_path).load(replica_of(published(4)))


SEVERAL: dict[str, Any] = {"rank": 4, "names": ["sums", "words"], "probe": ([1, 2, 3], [-0.5] * 4)}
"""A version of two adapters of rank 2."""


def of_two(engine: ScriptedEngine, directory: Path) -> AdapterLoader:
    engine.info = ServerInfo(**(INFO | {"max_loras_per_batch": 5}))
    return loader(engine, directory, replace(PLAN, names=("sums", "words")))


async def test_several_adapters_of_a_version_are_loaded_served_and_retired_together(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    adapters = of_two(engine, tmp_path)
    for version in (4, 5):
        loaded = await adapters.load(replica_of(published(version, **SEVERAL)))
        assert [*loaded] == ["sums", "words"]
        adapters.serve(loaded)
        await adapters.retire_former()
    ends = [f"{deed} {name}" for name in ("sums", "words") for deed in ("cut", "unload")]
    served = [f"serve {name}v{version}" for version in (4, 5) for name in ("sums", "words")]
    assert engine.adapters.calls == ["unload v3", *served, *ends]
    assert engine.adapters.loaded == ["somebody-elses", *(adapter.name for adapter in loaded.values())]


async def test_one_wrong_adapter_of_several_leaves_none_of_its_version(engine: ScriptedEngine, tmp_path: Path) -> None:
    wrong = SEVERAL | {"probe": ([1, 2, 3], [-0.5, -0.5, -0.5, -0.6])}
    with pytest.raises(VerificationError, match=r"gives token 2 of the probe the log-prob -0.50000, the learner -0.60000"):
        await of_two(engine, tmp_path).load(replica_of(published(4, **wrong)))
    assert engine.adapters.loaded == ["somebody-elses"]


async def test_one_that_stays_in_use_alone_keeps_its_slot(engine: ScriptedEngine, tmp_path: Path) -> None:
    adapters = of_two(engine, tmp_path)
    for version in (4, 5, 6):
        loaded = await adapters.load(replica_of(published(version, **SEVERAL)))
        if version == 4:
            engine.adapters.stuck = {loaded["words"].name}
        if version == 6:
            engine.adapters.stuck.clear()
        adapters.serve(loaded)
        await adapters.retire_former()
    assert engine.adapters.loaded == ["somebody-elses", *(adapter.name for adapter in loaded.values())]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 4, "names": ["sums", "verbs"]}, "has the adapters sums, verbs, and lora.adapters are sums, words"),
        ({}, "has the adapters of one name, and lora.adapters are sums, words: give learner and rollouts the same"),
    ],
)
async def test_other_adapters_than_those_of_the_settings_are_refused(
    engine: ScriptedEngine, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ServiceError, match=re.escape(text)):
        await of_two(engine, tmp_path).load(replica_of(published(4, **changes)))


async def test_several_need_a_matrix_and_a_slot_each(engine: ScriptedEngine, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="and the adapter's rank is 2, of 2 adapters"):
        await of_two(engine, tmp_path).load(replica_of(published(4, **SEVERAL | {"rank": 2})))
    adapters = of_two(engine, tmp_path)
    engine.info = ServerInfo(**INFO)
    with pytest.raises(ServiceError, match=r"with --max-loras-per-batch 3; start it with .* --max-loras-per-batch 5 "):
        await adapters.load(replica_of(published(4, **SEVERAL)))


def test_each_adapter_of_a_version_has_its_own_rows_and_columns_and_probe() -> None:
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB"]
    a_RI, b_OR = torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(3, 4)
    snapshot = build_snapshot(
        4,
        copy_adapter(
            [ServedParameter.alone(name, value) for name, value in zip(names, (a_RI, b_OR), strict=True)],
            rank=2, alpha=4.0, base=PublishedBase(copy_weights(BASE.items())), names=["sums", "words"],
            probe=([1, 2, 3], [-1.0, -2.0, -3.0, -4.0]),
        ),
    )  # fmt: skip
    manifest = snapshot.manifest
    assert manifest.adapter is not None
    parts = list(adapter_parts(manifest.adapter, manifest.tensors, snapshot.tensor_data()))
    for place, (part, logprobs) in enumerate(zip(parts, ([-1.0, -2.0], [-3.0, -4.0]), strict=True)):
        own = slice(2 * place, 2 * place + 2)
        assert part.info.probe_logprobs == logprobs
        assert [each.shape for each in part.tensors] == [[2, 3], [3, 2]]
        assert [each.offset for each in part.tensors] == [0, 24]
        for each, data, value in zip(part.tensors, part.data, (a_RI[own], b_OR[:, own]), strict=True):
            assert bytes(data) == value.contiguous().numpy().tobytes()
            assert each.digest == tensor_digest(bytes(data))


def test_the_names_of_several_adapters_are_part_of_their_digest() -> None:
    digests = {published(4, **SEVERAL | {"names": names}).manifest.digest for names in (["a", "b"], ["b", "a"])}
    assert len(digests) == 2


def test_the_plan_is_that_of_the_settings() -> None:
    overrides = ["lora.rank=8", "lora.alpha=16", "lora.publish=adapter", "model.dtype=bfloat16"]
    plan = AdapterPlan.of(load_settings(None, overrides))
    assert plan == AdapterPlan(rank=8, alpha=16.0, slots=3, tolerance=0.3, mode="retract")
    assert AdapterPlan.of(load_settings(None, ["lora.rank=8"])) is None
    several = ['lora.adapters=["sums", "words"]', "lora.adapter_field=kind"]
    assert AdapterPlan.of(load_settings(None, [*overrides, *several])) == replace(plan, names=("sums", "words"))
