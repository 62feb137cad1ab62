"""Expected checksums from checkpoint tensors."""

import hashlib
import random
from typing import Any, cast

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gspo_protocol.messages import TensorInfo
from gspo_services.rollout.sglang.client import Engine
from gspo_services.rollout.sglang.server_info import RankChecksums
from gspo_services.rollout.weights.verification import HeldTowers, tied_head
from gspo_services.rollout.weights.verify import Verification, Verifier, compare, compare_ranks
from gspo_services.shared.weights.checksums import (
    engine_hash,
    hash_function,
    sha256_checksum,
    tiled_checksum,
    xxh3_checksum,
)
from gspo_services.shared.weights.engine_parameters import checksums_of, merge
from tests.support.engines.cut_by_torch import Weights, bits, random_weights, rank_weights
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.wire.snapshots import snapshot_of

Tensor = tuple[TensorInfo, bytes]


def tensor(name: str, text: str, rows: int = 64) -> Tensor:
    """A tensor of ``rows`` rows whose bytes begin with ``text``, so that a wrong order shows."""
    data = text.encode().ljust(rows * 4, b"\0")
    return TensorInfo(name=name, dtype="float32", shape=[rows, 1], offset=0, num_bytes=len(data), digest="0" * 64), data


def layer(num_experts: int = 11) -> list[Tensor]:
    prefix = "model.layers.3"
    names = [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkvo"]
    names += [f"{prefix}.mlp.experts.{e}.{part}_proj.weight" for e in range(num_experts) for part in ("gate", "up", "down")]
    names += [f"{prefix}.mlp.gate.weight", "model.layers.4.mlp.up_proj.weight", "model.layers.4.mlp.gate_proj.weight"]
    tensors = [tensor(name, name) for name in names]
    random.Random(1).shuffle(tensors)
    return tensors


def texts(tensors: list[Tensor], name: str) -> list[str]:
    return [bytes(part).rstrip(b"\0").decode() for part in merge(tensors)[name].parts]


def test_tensors_lie_in_the_engine_as_it_merges_them() -> None:
    tensors = layer()
    prefix = "model.layers.3"
    assert texts(tensors, f"{prefix}.self_attn.qkv_proj.weight") == [f"{prefix}.self_attn.{x}_proj.weight" for x in "qkv"]
    assert texts(tensors, f"{prefix}.mlp.experts.w13_weight") == [
        f"{prefix}.mlp.experts.{e}.{part}_proj.weight" for e in range(11) for part in ("gate", "up")
    ]
    assert texts(tensors, f"{prefix}.mlp.experts.w2_weight") == [
        f"{prefix}.mlp.experts.{e}.down_proj.weight" for e in range(11)
    ]
    assert texts(tensors, "model.layers.4.mlp.gate_up_proj.weight") == [
        f"model.layers.4.mlp.{part}_proj.weight" for part in ("gate", "up")
    ]
    assert set(merge(tensors)) == {
        f"{prefix}.self_attn.qkv_proj.weight",
        f"{prefix}.self_attn.o_proj.weight",
        f"{prefix}.mlp.experts.w13_weight",
        f"{prefix}.mlp.experts.w2_weight",
        f"{prefix}.mlp.gate.weight",
        "model.layers.4.mlp.gate_up_proj.weight",
    }


@pytest.mark.parametrize(
    ("parameter", "parts"),
    [
        (
            "mlp.shared_experts.gate_up_proj.weight",
            ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"],
        ),
        (
            "self_attn.fused_qkv_a_proj_with_mqa.weight",
            ["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"],
        ),
        (
            "block_sparse_moe.experts.w13_weight",
            [f"block_sparse_moe.experts.{expert}.{part}.weight" for expert in range(2) for part in ("w1", "w3")],
        ),
        ("block_sparse_moe.experts.w2_weight", [f"block_sparse_moe.experts.{expert}.w2.weight" for expert in range(2)]),
        ("linear_attn.in_proj_qkvz.weight", ["linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"]),
        ("linear_attn.in_proj_ba.weight", ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"]),
    ],
)
def test_other_families_lie_there_under_names_of_their_own(parameter: str, parts: list[str]) -> None:
    names = [f"model.layers.0.{part}" for part in parts]
    tensors = [tensor(name, name) for name in reversed(names)]
    assert texts(tensors, f"model.layers.0.{parameter}") == names
    # Of w2 every expert that was sent is whole.
    assert merge(tensors[1:])[f"model.layers.0.{parameter}"].complete == parameter.endswith("w2_weight")


@pytest.mark.parametrize(
    ("sent", "parameter"),
    [
        ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_qkvz.weight"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.w13_weight"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.w2_weight"),
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.gate.weight"),
        ("mlp.experts.gate_up_proj_bias", "mlp.experts.w13_weight_bias"),
        ("mlp.experts.down_proj_bias", "mlp.experts.w2_weight_bias"),
    ],
)
def test_what_a_checkpoint_has_merged_or_stacked_is_a_whole_parameter(sent: str, parameter: str) -> None:
    tensors = [tensor(f"model.layers.0.{sent}", sent)]
    assert texts(tensors, f"model.layers.0.{parameter}") == [sent]
    assert merge(tensors)[f"model.layers.0.{parameter}"].complete


def test_stacked_experts_lie_there_transposed() -> None:
    stack = torch.arange(24.0).view(2, 3, 4)
    snapshot = snapshot_of(1, {"model.layers.0.mlp.experts.gate_up_proj": stack}.items())
    [parameter] = merge(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True)).values()
    assert parameter.name == "model.layers.0.mlp.experts.w13_weight"
    assert b"".join(parameter.parts) == stack.transpose(1, 2).contiguous().numpy().tobytes()


def test_experts_sent_stacked_and_one_by_one_are_no_whole_parameter() -> None:
    names = ["mlp.experts.down_proj", "mlp.experts.0.down_proj.weight"]
    [parameter] = merge([tensor(name, name) for name in names]).values()
    assert not parameter.complete


def test_beside_linear_attention_the_name_of_the_other_is_left_out() -> None:
    parts = ("k_proj", "q_proj", "v_proj", "o_proj", "q_norm")
    names = ["l.0.linear_attn.A_log", *(f"l.1.self_attn.{part}.weight" for part in parts)]
    expected = {"l.0.linear_attn.A_log", "l.1.qkv_proj.weight", "l.1.o_proj.weight", "l.1.q_norm.weight"}
    assert set(merge([tensor(name, name) for name in names])) == expected


def test_a_scale_that_the_engine_made_from_another_was_not_to_be_sent() -> None:
    tensors = [tensor("model.norm.weight", "scale")]
    actual = expected_checksums(tensors)
    assert compared(tensors, {**actual, "model.norm.gemma_weight": "0" * 16}).ok
    assert compared(tensors, {**actual, "other.gemma_weight": "0" * 16}).unsent == ["other.gemma_weight"]


def test_latent_attention_without_compressed_queries_is_not_merged() -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert merge([tensor(name, name)])[name].complete


def expected_checksums(tensors: list[Tensor]) -> dict[str, str]:
    return {name: sha256_checksum(parameter.parts) for name, parameter in merge(tensors).items()}


def compared(tensors: list[Tensor], actual: dict[str, str]) -> Verification:
    parameters = merge(tensors)
    return compare(parameters, actual, checksums_of(parameters, sha256_checksum))


def test_an_engine_with_the_sent_weights_is_accepted_and_each_difference_named() -> None:
    tensors = layer()
    actual = expected_checksums(tensors)
    assert compared(tensors, actual).ok
    gate = "model.layers.3.mlp.gate.weight"
    wrong = compared(tensors, {**actual, gate: "0" * 16})
    assert (wrong.ok, wrong.mismatched) == (False, [gate])
    missing = compared([*tensors, tensor("model.layers.3.mlp.experts.fused", "fused")], actual)
    assert (missing.ok, missing.missing) == (False, ["model.layers.3.mlp.experts.fused"])
    unsent = compared(tensors, {**actual, "model.norm.weight": "0" * 16})
    assert (unsent.ok, unsent.unsent) == (False, ["model.norm.weight"])


@pytest.mark.parametrize(
    "absent",
    ["model.layers.3.self_attn.k_proj.weight", "model.layers.3.mlp.experts.4.up_proj.weight"],
)
def test_a_parameter_of_which_a_part_was_not_sent_is_unverified(absent: str) -> None:
    tensors = layer()
    actual = expected_checksums(tensors)
    rest = [(info, data) for info, data in tensors if info.name != absent]
    verification = compared(rest, actual)
    assert verification.ok
    assert verification.unverified
    assert absent not in verification.unverified


def test_the_vocabulary_is_padded_with_zero_rows() -> None:
    embedding = tensor("model.embed_tokens.weight", "rows", rows=70)
    [parameter] = merge([embedding]).values()
    assert b"".join(parameter.parts) == embedding[1] + bytes(58 * 4)


def test_an_output_layer_that_is_the_embedding_needs_no_parameter_of_its_own() -> None:
    embedding, head = tensor("model.embed_tokens.weight", "e"), tensor("lm_head.weight", "e")
    actual = expected_checksums([embedding])
    assert compared([embedding, head], actual).ok
    other = compared([embedding, tensor("lm_head.weight", "h")], actual)
    assert other.missing == ["lm_head.weight"]


def test_a_tensor_sent_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"q_proj\.weight was sent twice"):
        merge([tensor("a.self_attn.q_proj.weight", "1"), tensor("a.self_attn.q_proj.weight", "2")])


@given(st.binary(max_size=200), st.integers(0, 200))
def test_checksums_do_not_depend_on_how_the_bytes_are_cut(data: bytes, cut: int) -> None:
    assert sha256_checksum([data[:cut], data[cut:]]) == hashlib.sha256(data).hexdigest()[:16]
    assert tiled_checksum([data[:cut], data[cut:]]) == tiled_checksum([data])
    assert xxh3_checksum([data[:cut], data[cut:]]) == "xxh3-" + xxhash.xxh3_128_hexdigest(data)


def test_the_cuda_hash_is_that_of_sglangs_kernel() -> None:
    # From sglang.kernels.ops.memory.gpu_tensor_hash in Triton's interpreter: two tiles, the second not full.
    assert tiled_checksum([bytes(range(256)) * 200]) == "221a36a16b5f8d4b"
    assert tiled_checksum([]) == "0" * 16


def test_an_engine_on_an_unknown_device_cannot_be_verified() -> None:
    with pytest.raises(ValueError, match="'npu'"):
        engine_hash("npu", ["221a36a16b5f8d4b"])


def test_checksums_show_their_hash() -> None:
    plain, named = sha256_checksum([b"weights"]), xxh3_checksum([b"weights"])
    assert [engine_hash(device, [plain]) for device in ("cpu", "cuda")] == ["cpu", "cuda"]
    assert [engine_hash(device, [named]) for device in ("cpu", "cuda", "npu")] == ["xxh3"] * 3
    assert [hash_function(name) for name in ("cpu", "cuda", "xxh3")] == [sha256_checksum, tiled_checksum, xxh3_checksum]
    assert engine_hash("cpu", []) == "cpu", "an engine that says nothing holds nothing"


@pytest.fixture
def engine() -> ScriptedEngine:
    made = ScriptedEngine()
    made.checksum = xxh3_checksum
    made.loaded = {info.name: (info, data) for info, data in layer()}
    return made


async def test_an_engine_is_asked_once_for_its_hash(engine: ScriptedEngine) -> None:
    verifier = Verifier(cast(Engine, engine))
    expected = await verifier.expect(layer())
    assert engine.num_checksums == 1
    assert (await verifier.verify(expected)).ok
    await verifier.expect(layer())
    assert engine.num_checksums == 2


async def test_an_engine_that_changes_its_hash_is_verified_at_the_next_try(engine: ScriptedEngine) -> None:
    verifier = Verifier(cast(Engine, engine))
    expected = await verifier.expect(layer())
    engine.checksum = sha256_checksum
    assert len((await verifier.verify(expected)).mismatched) == len(expected.parameters)
    assert (await verifier.verify(await verifier.expect(layer()))).ok


def sharded(*held: Weights) -> ScriptedEngine:
    """Two ranks, each with a version of its own."""
    engine = ScriptedEngine()
    engine.ranks = shards_of(*held)
    return engine


def shards_of(*held: Weights) -> list[dict[str, str]]:
    ranks = [rank_weights(weights, rank, tensor=2) for rank, weights in enumerate(held)]
    return [{name: xxh3_checksum([bits(each)]) for name, each in weights.items()} for weights in ranks]


def sent_of(weights: Weights) -> list[tuple[TensorInfo, Any]]:
    snapshot = snapshot_of(1, weights.items())
    return list(zip(snapshot.manifest.tensors, snapshot.tensor_data(), strict=True))


async def test_each_rank_is_compared_with_its_own_shards_and_named_with_what_it_has() -> None:
    before, after = random_weights(seed=1), random_weights(seed=2)
    engine = sharded(before, before)
    verifier = Verifier(cast(Engine, engine), kv_heads=2)
    assert (await verifier.verify(await verifier.expect(sent_of(before)))).ok
    expected = await verifier.expect(sent_of(after))
    engine.ranks = shards_of(after, before)
    missed = await verifier.verify(expected)
    assert missed.mismatched == [f"rank 1: {name} (it has the shard of the version before)" for name in expected.ranks[1]]
    odd = dict(after)
    odd["model.norm.weight"] = odd["model.norm.weight"] + 1
    engine.ranks = shards_of(odd, after)
    assert (await verifier.verify(expected)).mismatched == ["rank 0: model.norm.weight"]
    engine.ranks = shards_of(after, after)
    assert (await verifier.verify(expected)).ok


async def test_shards_that_ranks_have_swapped_are_named() -> None:
    weights = random_weights(experts=4)
    engine = sharded(weights, weights)
    verifier = Verifier(cast(Engine, engine), kv_heads=2)
    expected = await verifier.expect(sent_of(weights))
    right = await engine.weights_checksums()
    name = "model.layers.0.mlp.experts.w13_weight"
    swapped = [{**each.checksums, name: other.checksums[name]} for each, other in zip(right, right[::-1], strict=True)]
    reported = [RankChecksums(checksums=each, rank=rank) for rank, each in enumerate(swapped)]
    assert compare_ranks(expected, right).ok
    found = compare_ranks(expected, reported)
    assert found.mismatched == [
        f"rank 0: {name} (it has the shard of rank 1)",
        f"rank 1: {name} (it has the shard of rank 0)",
    ]
    without = [RankChecksums(checksums={}, rank=0), right[1]]
    assert all(each.startswith("rank 0: ") for each in compare_ranks(expected, without).missing)


async def test_a_server_of_another_number_of_ranks_is_another_server() -> None:
    weights = random_weights()
    engine = sharded(weights, weights)
    verifier = Verifier(cast(Engine, engine), kv_heads=2)
    expected = await verifier.expect(sent_of(weights))
    one = compare_ranks(expected, [RankChecksums(checksums={})])
    assert one.mismatched == ["the server has 1 ranks, but had 2 before: it is a different server"]


def test_of_a_text_tower_the_engines_names_are_those_of_its_class_and_a_tied_head_is_known() -> None:
    inside = [tensor(f"model.language_model.layers.0.mlp.{part}_proj.weight", part) for part in ("gate", "up")] + [
        tensor("model.language_model.embed_tokens.weight", "e", rows=3),
        tensor("lm_head.weight", "e", rows=3),
    ]
    assert set(merge(inside)) == {"model.layers.0.mlp.gate_up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"}
    nested = [tensor("language_model.model.embed_tokens.weight", "e", rows=3)]
    (embedding,) = merge(nested).values()
    assert (embedding.name, embedding.padding_bytes) == ("language_model.model.embed_tokens.weight", 61 * 4)
    norms = ("self_attn.q_norm", "pre_feedforward_layernorm")
    gemma = [*nested, *(tensor(f"language_model.model.layers.0.{norm}.weight", norm) for norm in norms)]
    assert merge(gemma)[embedding.name].padding_bytes == 0, "as Gemma 3's class has it"
    assert tied_head({"language_model.model.embed_tokens.weight": "a", "language_model.lm_head.weight": "a"})
    assert not tied_head({"language_model.lm_head.weight": "a"})


@pytest.mark.parametrize(
    ("sent", "own", "other"),
    [
        ("language_model.model.norm.weight", "language_model.model.norm.weight", "vision_tower.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight", "visual.merger.norm.weight"),
    ],
)
def test_towers_that_no_version_has_are_held_against_the_engines_first_report(sent: str, own: str, other: str) -> None:
    parameters, held = merge([tensor(sent, "a")]), HeldTowers()

    def found(other_digest: str, *more: str) -> Verification:
        report = {own: "x", other: other_digest} | dict.fromkeys(more, "y")
        return held.checked(compare(parameters, report, {own: "x"}), parameters, [report])

    assert found("b") == Verification()
    assert found("b", "model.extra.weight", "language_model.extra").unsent
    changed = found("c")
    assert changed.mismatched == [f"{other} (of a tower that is not trained)"]
    assert changed.unsent == []
    gone = held.checked(compare(parameters, {own: "x"}, {own: "x"}), parameters, [{own: "x"}])
    assert gone.mismatched == [f"{other} (of a tower that is not trained)"]


def test_a_model_without_other_towers_has_nothing_that_is_not_sent() -> None:
    parameters = merge([tensor("model.norm.weight", "a")])
    report = {"model.norm.weight": "x", "vision_tower.norm.weight": "y"}
    found = HeldTowers().checked(compare(parameters, report, {"model.norm.weight": "x"}), parameters, [report])
    assert found.unsent == ["vision_tower.norm.weight"]
