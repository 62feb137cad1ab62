"""Memory of ranks, engines and machines: the tables of the guide, and what was measured."""

from dataclasses import replace
from typing import Any

import pytest

from gspo_services.shared.estimates import (
    activation_bytes_per_token,
    device_named,
    engine_memory,
    learner_host,
    learner_memory,
    rollout_host,
    shape_of,
)
from gspo_services.shared.settings import Settings
from tests.support.checking.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B, TINY

GIB = 2**30


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


@pytest.mark.parametrize(
    ("stage", "dtype", "weights", "gradients", "optimizer"),
    [
        (0, "float32", 4, 4, 8),
        (1, "float32", 4, 8, 3),
        (1, "bfloat16", 2, 6, 3),
        (2, "bfloat16", 2, 1, 3),
        (3, "bfloat16", 0.5, 1, 3),
    ],
)
def test_a_rank_holds_what_the_table_of_the_guide_says(
    stage: int, dtype: str, weights: float, gradients: float, optimizer: float
) -> None:
    shape = shape_of(QWEN3_8B)
    memory = learner_memory(shape, settings(learner={"num_ranks": 4, "zero_stage": stage, "dtype": dtype}), cuda=True)
    bytes_a_parameter = [part / shape.parameters for part in (memory.weights, memory.gradients, memory.optimizer)]
    assert bytes_a_parameter == pytest.approx([weights, gradients, optimizer])
    assert memory.on_host == 0


def test_ranks_that_share_the_experts_hold_a_part_of_them_before_zero_does() -> None:
    shape = shape_of(QWEN3_30B)
    learner = {"num_ranks": 8, "zero_stage": 2, "dtype": "bfloat16", "expert_parallel": 4}
    memory = learner_memory(shape, settings(learner=learner), cuda=True)
    assert memory.weights == pytest.approx(2 * (shape.other_parameters + shape.expert_parameters / 4))
    assert memory.optimizer == pytest.approx(12 * shape.parameters / 8)


@pytest.mark.parametrize(
    ("stage", "offload", "on_device", "on_host"),
    [(2, "optimizer", 2 + 1, 16 / 4), (3, "optimizer", 0.5, 20 / 4), (3, "optimizer_and_parameters", 0, 22 / 4)],
)
def test_offload_moves_what_the_table_of_the_guide_says(stage: int, offload: str, on_device: float, on_host: float) -> None:
    shape = shape_of(QWEN3_8B)
    learner = {"num_ranks": 4, "zero_stage": stage, "dtype": "bfloat16", "offload": offload}
    memory = learner_memory(shape, settings(learner=learner), cuda=True)
    fixed = memory.weights + memory.gradients + memory.optimizer
    assert fixed / shape.parameters == pytest.approx(on_device)
    assert memory.on_host / shape.parameters == pytest.approx(on_host)


def test_a_reference_is_a_whole_copy_on_each_rank() -> None:
    shape = shape_of(QWEN3_06B)
    with_kl = settings(learner={"num_ranks": 4, "zero_stage": 3, "dtype": "bfloat16"}, objective={"kl_coefficient": 0.04})
    assert learner_memory(shape, with_kl, cuda=True).reference == 2 * shape.parameters


def test_checkpointing_leaves_one_layer_and_the_boundaries_of_the_others() -> None:
    shape = shape_of(QWEN3_8B)
    given = {"dtype": "bfloat16", "max_tokens_per_micro_batch": 16_384}
    without = learner_memory(shape, settings(learner=given), cuda=True).activations
    with_it = learner_memory(shape, settings(learner=given | {"activation_checkpointing": True}), cuda=True).activations
    # 36 layers of some 200 KB a token become one, and 36 boundaries of 8 KB.
    assert 8 < without.low / with_it.low < 36
    assert with_it.high < 20 * GIB


def test_an_mlp_in_tiles_takes_a_tile_and_checkpoints_may_lie_on_the_host() -> None:
    shape = shape_of(QWEN3_8B)
    given = {"dtype": "bfloat16", "max_tokens_per_micro_batch": 131_072, "activation_checkpointing": True}
    whole, tiled, away = (
        learner_memory(shape, settings(learner=given | more), cuda=True)
        for more in ({}, {"mlp_tiles": 16}, {"mlp_tiles": 16, "activation_offload": True})
    )
    hidden_values = 131_072 * 4 * 2 * shape.ffn
    inputs = 131_072 * 2 * shape.hidden * shape.layers
    assert whole.activations.low - tiled.activations.low == pytest.approx(
        # Backward, half as much again passes through a whole MLP.
        0.9 * (hidden_values * (1.5 - 1 / 16) - 131_072 * 2 * shape.hidden)
    )
    assert tiled.activations.low - away.activations.low == pytest.approx(0.9 * inputs)
    assert (tiled.activations_on_host, away.activations_on_host, away.on_host) == (0, inputs, inputs)


@pytest.mark.parametrize("config", [TINY, QWEN3_06B | {"hidden_size": 96, "intermediate_size": 256, "vocab_size": 300,
                                                       "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
                                                       "num_key_value_heads": 2}], ids=["experts", "dense"])  # fmt: skip
@pytest.mark.parametrize("tiles", [1, 4])
def test_activations_are_what_autograd_keeps(config: dict[str, Any], tiles: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gspo.model.activations import tile_mlps
    from gspo.model.attention import register_segment_attention

    known = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "architectures"})
    model = AutoModelForCausalLM.from_config(known, attn_implementation=register_segment_attention())
    model.train()
    if tiles > 1:
        tile_mlps(model, tiles)
    tokens = 256
    ids = torch.randint(0, config["vocab_size"], (1, tokens))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    held = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (held.append(tensor), keep(tensor))[1], lambda tensor: tensor
    ):
        model.model(input_ids=ids, position_ids=torch.arange(tokens)[None], cu_seqlens=[0, tokens])
    measured = sum(kept.values()) / tokens / config["num_hidden_layers"]
    estimated, _ = activation_bytes_per_token(shape_of(config), 4, tiles)
    # 0.7 to 1.5 is the span that the estimate has for allocators and kernels.
    assert 0.7 < measured / estimated < 1.5


def test_the_tiny_models_learner_takes_what_a_process_with_torch_does() -> None:
    total = learner_memory(shape_of(TINY), settings(), cuda=False).total
    assert 0.5 * GIB < total.low < total.high < 2 * GIB


def test_a_gpu_keeps_what_the_weights_leave_for_the_cache() -> None:
    device = device_named("NVIDIA H100 80GB HBM3")
    assert device is not None
    given = settings(model={"dtype": "bfloat16"}, rollout={"server_args": ["--mem-fraction-static", "0.85"]})
    memory = engine_memory(shape_of(QWEN3_8B), given, device.memory_bytes)
    room = 0.85 * device.memory_bytes - 2 * 8_190_735_360
    assert memory.cache_tokens.low == memory.cache_tokens.high == pytest.approx(room / 147_456)
    assert memory.running(1000) == pytest.approx(room / 147_456 / 1000)


def test_ranks_that_share_a_model_have_a_part_of_its_weights_and_of_its_heads() -> None:
    shape, share = shape_of(QWEN3_30B), ["--mem-fraction-static", "0.9"]
    rollout = {"server_args": share, "tensor_parallel": 8, "data_parallel": 2}
    one = engine_memory(shape, settings(model={"dtype": "bfloat16"}, rollout={"server_args": share}), 80e9)
    many = engine_memory(shape, settings(model={"dtype": "bfloat16"}, rollout=rollout), 80e9)
    assert many.weights == one.weights / 8
    assert many.cache_bytes_per_token == one.cache_bytes_per_token / shape.kv_heads
    assert many.cache_tokens.low == pytest.approx(2 * (0.9 * 80e9 - many.weights) / many.cache_bytes_per_token)


@pytest.mark.parametrize(
    "arguments", [["--mem-fraction-static=0.5"], ["--log-level", "info", "--mem-fraction-static", "0.5"]]
)
def test_the_share_of_a_gpu_is_found_however_it_is_written(arguments: list[str]) -> None:
    memory = engine_memory(shape_of(TINY), settings(rollout={"server_args": arguments}), 1e9)
    assert memory.total.low == memory.total.high == pytest.approx(0.5e9)


@pytest.mark.parametrize("arguments", [["--mem-fraction-static"], ["--mem-fraction-static", "much"], []])
def test_without_a_share_sglang_chooses(arguments: list[str]) -> None:
    memory = engine_memory(shape_of(TINY), settings(rollout={"server_args": arguments}), 1e9)
    assert (memory.total.low, memory.total.high) == pytest.approx((0.8e9, 0.9e9))


def test_a_model_that_is_larger_than_the_gpu_leaves_no_cache() -> None:
    memory = engine_memory(shape_of(QWEN3_30B), settings(model={"dtype": "bfloat16"}), 24e9)
    assert memory.cache_tokens.high == 0
    assert memory.total.low > 60e9


def test_machines_hold_versions_and_the_copy_of_a_checkpoint() -> None:
    shape = shape_of(QWEN3_30B)
    given = settings(
        model={"dtype": "bfloat16"},
        learner={
            "num_ranks": 8, "num_nodes": 2, "rendezvous_address": "127.0.0.1:1", "zero_stage": 3, "dtype": "bfloat16",
        },
    )  # fmt: skip
    memory = learner_memory(shape, given, cuda=True)
    host = learner_host(shape, given, memory)
    version = 2 * shape.parameters
    assert (host.snapshots.low, host.snapshots.high) == (version / 2, 3.5 * version / 2)
    assert host.checkpoint == 12 * shape.parameters / 2 + GIB / 2
    assert rollout_host(shape, given).total.high == version + version / 3
    foreground = given.model_copy(update={"learner": given.learner.model_copy(update={"checkpoint_in_background": False})})
    assert learner_host(shape, foreground, replace(memory, optimizer_on_host=1e9)).total.low == version / 2 + GIB / 2 + 8e9


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100", "H100"), ("NVIDIA H200", "H200"), ("RTX 4090", "4090"), ("NVIDIA GeForce RTX 4090", "4090"), ("l40s", "L40S"),
     ("A100-SXM4-80GB", "A100"), ("TPU", None), ("", None)],
)  # fmt: skip
def test_a_device_is_known_by_part_of_its_name(name: str, found: str | None) -> None:
    device = device_named(name)
    assert (device.name if device else None) == found


def test_a_device_has_the_memory_that_it_reports() -> None:
    device = device_named("NVIDIA A100-SXM4-40GB", 40_960 * 2**20)
    assert device is not None
    assert device.memory_bytes == 40 * GIB


@pytest.mark.parametrize(
    ("config", "targets", "expected"),
    [
        # 2 layers: q 64 + 64, o 64 + 64, k and v 64 + 32 each.
        (TINY, ["attention"], 2 * (128 + 128 + 96 + 96)),
        # 2 layers of 8 experts: gate and up 64 + 128, down 64 + 64.
        (TINY, ["experts"], 2 * 8 * (192 + 128)),
        (QWEN3_06B, ["mlp"], 28 * 3 * (1024 + 3072)),
    ],
)
def test_adapters_have_rank_times_the_sum_of_both_dimensions(
    config: dict[str, Any], targets: list[str], expected: int
) -> None:
    assert shape_of(config).lora_parameters(4, targets) == 4 * expected


def test_with_adapters_only_they_have_gradients_moments_and_a_place_in_checkpoints() -> None:
    shape = shape_of(QWEN3_8B)
    learner = {"num_ranks": 4, "zero_stage": 2, "dtype": "bfloat16"}
    with_lora = settings(learner=learner, lora={"rank": 16, "target_modules": ["attention", "mlp"]})
    trained = shape.lora_parameters(16, ["attention", "mlp"])
    memory, whole = (learner_memory(shape, each, cuda=True) for each in (with_lora, settings(learner=learner)))
    assert trained < shape.parameters / 100
    assert memory.weights == pytest.approx(2 * (shape.parameters + trained))
    assert memory.gradients == pytest.approx(4 * trained / 4)
    assert memory.optimizer == pytest.approx(12 * trained / 4)
    assert memory.activations == whole.activations
    assert learner_host(shape, with_lora, memory).checkpoint == pytest.approx(14 * trained)


def test_a_version_that_is_an_adapter_takes_a_hundredth_of_the_model_or_less() -> None:
    for config in (QWEN3_8B, QWEN3_30B):
        shape = shape_of(config)
        given = settings(model={"dtype": "bfloat16"}, lora={"rank": 16, "publish": "adapter"})
        assert shape.lora_parameters(16, ["attention"]) < 0.01 * shape.parameters
        rollout, version = rollout_host(shape, given).total, 2 * shape.parameters
        assert rollout.high == 2 * 2 * shape.lora_parameters(16, ["attention"])
        learner = learner_host(shape, given, learner_memory(shape, given, cuda=True)).snapshots
        assert (learner.low, learner.high) == (version, 2 * version), "the model below, and its copy at the start"


def test_adapters_of_experts_keep_the_sum_of_each_layer_whose_activations_are_kept() -> None:
    shape = shape_of(QWEN3_30B)
    found = {}
    for name, targets in (("without", ["attention"]), ("with", ["attention", "experts"])):
        for checkpointing in (False, True):
            learner = {
                "dtype": "bfloat16", "activation_checkpointing": checkpointing, "max_tokens_per_micro_batch": 32_768,
            }  # fmt: skip
            each = settings(learner=learner, lora={"rank": 8, "target_modules": targets})
            found[name, checkpointing] = learner_memory(shape, each, cuda=True).activations.low
    assert found["with", False] - found["without", False] == pytest.approx(0.9 * 2 * shape.expert_parameters)
    assert found["with", True] - found["without", True] == pytest.approx(0.9 * 2 * shape.expert_parameters / 48)


def test_on_one_rank_zero_2_keeps_the_gradients_of_a_pass_beside_their_sums() -> None:
    """61 GiB for four layers of Qwen3-30B-A3B, on an H100 and an H200: docs/evidence."""
    shape = shape_of(QWEN3_30B | {"num_hidden_layers": 4})
    learner = {"dtype": "bfloat16", "zero_stage": 2, "activation_checkpointing": True, "max_tokens_per_micro_batch": 16_384}
    total = learner_memory(shape, settings(learner=learner | {"logprob_chunk_tokens": 1024}), cuda=True).total
    assert (total.low - 0.8 * GIB + total.high - 2.0 * GIB) / 2 == pytest.approx(60.9 * GIB, rel=0.05)


def test_zero_3_has_what_it_gathers_twice_for_a_while() -> None:
    shape = shape_of(QWEN3_30B)
    learner = {"num_ranks": 8, "dtype": "bfloat16"}
    low = {
        stage: learner_memory(shape, settings(learner=learner | {"zero_stage": stage}), cuda=True).working.low
        for stage in (2, 3)
    }
    layer = 128 * 3 * 2048 * 768
    assert low[3] - low[2] == pytest.approx(0.9 * 2 * 4 * layer)


def test_zero_1_sends_a_second_copy_of_all_gradients_when_the_activations_are_gone() -> None:
    shape, learner = shape_of(QWEN3_30B), {"num_ranks": 8, "dtype": "bfloat16", "zero_stage": 1}
    memory = learner_memory(shape, settings(learner=learner), cuda=True)
    assert memory.bucket + memory.activations.low == pytest.approx(2 * shape.parameters)
