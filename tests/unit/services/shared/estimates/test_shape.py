"""Numbers of parameters from config.json, against those that the models' makers publish."""

from typing import Any

import pytest
import torch

from gspo_services.shared.estimates import ShapeError, shape_of
from tests.support.checking.shapes import MIXTRAL_8X7B, QWEN3_06B, QWEN3_8B, QWEN3_30B, TINY
from tests.support.paper.shapes import MODELS
from tests.support.policy.families import FAMILIES, family_config

QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_06B, 596_049_920),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B, 30_532_122_624),
        (TINY, 256_384),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN2_7B, 7_615_616_512),
        (LLAMA3_8B, 8_030_261_248),
    ],
    ids=["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "tiny", "mixtral-8x7b", "qwen2-7b", "llama3-8b"],
)
def test_the_parameters_are_those_of_the_published_model(config: dict[str, Any], parameters: int) -> None:
    assert shape_of(config).parameters == parameters


def test_a_token_meets_the_chosen_experts_only_and_not_the_embedding() -> None:
    shape = shape_of(QWEN3_30B)
    experts = 48 * 128 * 3 * 2048 * 768
    assert shape.expert_parameters == experts
    assert shape.active_parameters == shape.parameters - experts * 15 // 16 - 151936 * 2048
    # A tied head is the embedding, and is multiplied.
    assert shape_of(QWEN3_06B).active_parameters == 596_049_920


def test_a_token_of_the_cache_has_a_key_and_a_value_in_each_layer() -> None:
    assert shape_of(QWEN3_8B).kv_bytes(2) == 147_456
    assert shape_of(TINY).kv_bytes(4) == 512


def test_dense_layers_of_a_mixture_have_an_ordinary_mlp() -> None:
    config = QWEN3_30B | {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2}
    shape = shape_of(config)
    # Every second layer has experts, and of those layer 1 is listed as dense.
    assert shape.expert_parameters == 23 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": "many"}, "vocab_size is many"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1"),
        ({"head_dim": 2**50}, "head_dim is"),
        ({"num_experts": [8]}, "num_experts is [8]"),
        ({"num_hidden_layers": 2**39}, "num_hidden_layers is 549755813888: at most 10,000"),
        ({"layer_types": ["full_attention", "conv"]}, "has layers of type conv whose parameters are not counted here"),
        ({"layer_types": ["linear_attention"]}, "has layers of type linear_attention"),
        ({"mamba_d_state": 16}, "has layers with mamba_d_state"),
        ({"model_type": "gemma4_text"}, "gemma4_text has layers whose parameters"),
    ],
)
def test_a_config_without_a_shape_names_the_key(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ShapeError, match=r"number from 1 up|are read; correct|use another model") as caught:
        shape_of(QWEN3_30B | change)
    assert part in str(caught.value)


@pytest.mark.parametrize("config", [*MODELS.values(), *map(family_config, FAMILIES)], ids=[*MODELS, *FAMILIES])
def test_a_model_has_as_many_parameters_as_transformers_gives_it(config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_model_whose_layers_all_have_experts_needs_no_width_of_others() -> None:
    config = {name: value for name, value in QWEN3_30B.items() if name != "intermediate_size"}
    assert shape_of(config).parameters == shape_of(QWEN3_30B).parameters
    with pytest.raises(ShapeError, match="intermediate_size is None"):
        shape_of(config | {"mlp_only_layers": [0]})


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-30B-A3B", 30.5, 3.0), ("Qwen3-235B-A22B", 235.1, 21.6), ("GLM-4.5-Air", 106.9, 12.8),
        ("GLM-4.5", 352.8, 32.9), ("DeepSeek-V3", 671.0, 36.6), ("Kimi-K2", 1026.4, 31.7), ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.2), ("Mixtral-8x7B", 46.7, 12.7), ("Qwen3-Next-80B-A3B", 79.7, 3.6),
        ("MiniMax-M2", 228.7, 10.4), ("Qwen3.5-35B-A3B", 34.7, 2.9),
    ],
)  # fmt: skip
def test_published_sizes_have_their_published_numbers(name: str, billions: float, active: float) -> None:
    """The active ones without the embedding, which is looked up: GLM-4.5 counts it, and 355 with its further layer."""
    shape = shape_of(MODELS[name])
    assert (round(shape.parameters / 1e9, 1), round(shape.active_parameters / 1e9, 1)) == (billions, active)


def test_linear_layers_keep_no_keys() -> None:
    shape = shape_of(MODELS["Qwen3-Next-80B-A3B"])
    assert shape.kv_bytes(2) == 12 * 2 * 2 * 256 * 2
    assert shape.attention_width == 12 * 16 * 256
