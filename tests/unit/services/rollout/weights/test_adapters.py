"""Which servers, models and settings adapters are loaded into; what an engine does with them is in
tests/integration/weights/test_adapters.py."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from gspo.model.serving_layout import ServedParameter
from gspo_services.learner.weights.adapters import PublishedBase, copy_adapter
from gspo_services.learner.weights.snapshot import Snapshot, build_snapshot
from gspo_services.learner.weights.weight_copy import copy_weights
from gspo_services.rollout.sglang.adapters import Adapter
from gspo_services.rollout.sglang.answers import RankChecksums, ServerInfo
from gspo_services.rollout.sglang.client import EngineError
from gspo_services.rollout.weights.adapters import AdapterLoader, AdapterPlan, BaseUnknownError, lora_arguments
from gspo_services.rollout.weights.loader import VerificationError
from gspo_services.rollout.weights.replica import Replica
from gspo_services.rollout.weights.verify import Verifier
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.shared.settings import load_settings

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


class Engine:
    def __init__(self, **changes: Any) -> None:
        self.adapters = Adapters()
        self.info = ServerInfo(**(INFO | changes))
        self.checksums = PublishedBase(copy_weights(BASE.items()))._compute("cpu")
        self.said_version: int | None = 7
        self.used: set[str] = set()
        self.stuck: set[str] = set()

    async def server_info(self) -> ServerInfo:
        return self.info

    async def weights_checksums(self) -> list[RankChecksums]:
        return [RankChecksums(checksums=self.checksums)]

    async def weight_version(self) -> int | None:
        return self.said_version

    def serve(self, adapter: Adapter) -> None:
        self.adapters.calls.append(f"serve v{adapter.version}")

    def uses(self, name: str) -> bool:
        return name in self.used

    async def cut(self, name: str) -> bool:
        self.used.discard(name)
        self.adapters.calls.append(f"cut {name.rpartition('-')[2]}")
        return name not in self.stuck


def published(version: int, **changes: Any) -> Snapshot:
    base = PublishedBase(copy_weights(BASE.items()))
    matrices = [
        ServedParameter.alone(
            f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_{side}.weight", torch.full(shape, float(version))
        )
        for part in "qkvo"
        for side, shape in (("A", (2, 3)), ("B", (3, 2)))
    ]
    probe = ([1, 2, 3], [-0.5, -0.5])
    return build_snapshot(
        version, copy_adapter(matrices, **({"rank": 2, "alpha": 4.0, "base": base, "probe": probe} | changes))
    )


def replica_of(snapshot: Snapshot, checksums: dict[str, str] | None = None) -> Replica:
    """A replica that has this version, and was told what an engine must report."""
    replica = Replica()
    landing = replica.landing(snapshot.manifest)
    landing.put(0, snapshot.data.data)
    known = PublishedBase(copy_weights(BASE.items()))._compute("cpu") if checksums is None else checksums
    replica.replace(structs.replace(snapshot.manifest, checksums=known), landing)  # type: ignore[arg-type]
    return replica


@pytest.fixture
def engine() -> Engine:
    return Engine()


def loader(engine: Engine, directory: Path, plan: AdapterPlan = PLAN) -> AdapterLoader:
    return AdapterLoader(engine, Verifier(engine), directory, plan)  # type: ignore[arg-type]


async def test_an_adapter_is_loaded_and_only_then_served_and_the_former_one_unloaded(engine: Engine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path)
    for version in (4, 5):
        adapter = await adapters.load(replica_of(published(version)))
        assert (adapter.version, adapter.base_version) == (version, 7)
        adapters.serve(adapter)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", "serve v4", "serve v5", "cut v4", "unload v4"]
    assert engine.adapters.loaded == ["somebody-elses", adapter.name]
    assert list((tmp_path / "loaded").iterdir()) == [], "SGLang must not find the files of an unloaded adapter"


async def test_in_place_an_adapter_in_use_stays_until_its_slot_is_wanted(engine: Engine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path, AdapterPlan(rank=2, alpha=4.0, slots=2, tolerance=1e-4, mode="in_place"))
    for version in (4, 5, 6):
        adapter = await adapters.load(replica_of(published(version)))
        engine.used.add(adapter.name)
        adapters.serve(adapter)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", "serve v4", "serve v5", "cut v4", "unload v4", "serve v6"]


async def test_in_place_nothing_is_cut_while_there_are_slots(engine: Engine, tmp_path: Path) -> None:
    engine.info = ServerInfo(**(INFO | {"max_loras_per_batch": 9}))
    adapters = loader(engine, tmp_path, AdapterPlan(rank=2, alpha=4.0, slots=8, tolerance=1e-4, mode="in_place"))
    for version in range(4, 9):
        adapter = await adapters.load(replica_of(published(version)))
        engine.used.add(adapter.name)
        adapters.serve(adapter)
        await adapters.retire_former()
    assert engine.adapters.calls == ["unload v3", *(f"serve v{version}" for version in range(4, 9))]


async def test_an_adapter_whose_requests_do_not_end_is_unloaded_with_a_later_version(engine: Engine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path)
    for version in (4, 5, 6):
        adapter = await adapters.load(replica_of(published(version)))
        engine.stuck = {adapter.name} if version == 4 else engine.stuck if version == 5 else set()
        adapters.serve(adapter)
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
        await loader(Engine(**changes), tmp_path).load(replica_of(published(4)))
    assert said in str(caught.value)
    wanted = "--enable-lora --max-lora-rank 2 --max-loras-per-batch 3 --lora-target-modules q_proj k_proj v_proj o_proj"
    assert wanted == " ".join(lora_arguments(2, 2))
    assert wanted in str(caught.value) or changes == {"tp_size": 2}


async def test_a_server_that_says_all_modules_can_hold_any(tmp_path: Path) -> None:
    assert (await loader(Engine(lora_target_modules=["all"]), tmp_path).load(replica_of(published(4)))).version == 4


async def test_a_server_without_a_version_of_its_own_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.said_version = None
    with pytest.raises(ServiceError, match="without a number as --weight-version; start it with 0"):
        await loader(engine, tmp_path).load(replica_of(published(4)))


async def test_nothing_is_loaded_before_the_learner_has_said_what_its_model_is(engine: Engine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path)
    with pytest.raises(BaseUnknownError):
        await adapters.load(replica_of(published(4), checksums={}))
    assert adapters.wants_checksums
    await adapters.load(replica_of(published(4)))
    assert not adapters.wants_checksums
    await adapters.load(replica_of(published(5), checksums={}))


async def test_a_learner_that_goes_on_with_another_model_is_asked_what_it_is(engine: Engine, tmp_path: Path) -> None:
    adapters = loader(engine, tmp_path)
    await adapters.load(replica_of(published(4)))
    other = PublishedBase(copy_weights({**BASE, "lm_head.weight": torch.zeros(64, 2)}.items()))
    with pytest.raises(BaseUnknownError):
        await adapters.load(replica_of(published(5, base=other), checksums={}))
    with pytest.raises(ServiceError, match=r"1 differ, such as lm_head\.weight"):
        await adapters.load(replica_of(published(5, base=other), checksums=other._compute("cpu")))


@pytest.mark.parametrize(("absent", "is_fine"), [("lm_head.weight", True), ("model.embed_tokens.weight", False)])
async def test_only_a_head_that_is_the_embedding_may_be_missing(
    engine: Engine, tmp_path: Path, absent: str, is_fine: bool
) -> None:
    engine.checksums = {name: value for name, value in engine.checksums.items() if name != absent}
    try:
        await loader(engine, tmp_path).load(replica_of(published(4)))
    except ServiceError as error:
        assert not is_fine
        assert absent in str(error)
    else:
        assert is_fine


async def test_an_adapter_that_the_server_refuses_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    engine.adapters.refuse = "no room"
    with pytest.raises(EngineError, match="no room"):
        await loader(engine, tmp_path).load(replica_of(published(4)))
    assert list((tmp_path / "loaded").iterdir()) == []


async def test_an_adapter_that_moves_log_probs_otherwise_is_unloaded(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"gives token 2 of the probe the log-prob -0.50000, the learner -0.50100"):
        await loader(engine, tmp_path).load(replica_of(published(4, probe=([1, 2, 3], [-0.5, -0.501]))))
    assert engine.adapters.loaded == ["somebody-elses"]
    for nothing in (float("nan"), float("inf")):
        with pytest.raises(VerificationError, match="the mean difference is"):
            await loader(engine, tmp_path).load(replica_of(published(4, probe=([1, 2, 3], [-0.5, nothing]))))


async def test_a_server_that_reports_slots_must_report_this_one(tmp_path: Path) -> None:
    engine = Engine(custom_weight_loader=["gspo_services.shared.sglang_cpu.adapters.slots"])

    async def nothing(name: str) -> dict[str, str]:
        return {}

    engine.adapters.slots = nothing  # type: ignore[attr-defined]
    with pytest.raises(VerificationError, match="4 of 4 matrices in the engine differ"):
        await loader(engine, tmp_path).load(replica_of(published(4)))


def test_the_plan_is_that_of_the_settings() -> None:
    overrides = ["lora.rank=8", "lora.alpha=16", "lora.publish=adapter", "model.dtype=bfloat16"]
    plan = AdapterPlan.of(load_settings(None, overrides))
    assert plan == AdapterPlan(rank=8, alpha=16.0, slots=3, tolerance=0.3, mode="retract")
    assert AdapterPlan.of(load_settings(None, ["lora.rank=8"])) is None
