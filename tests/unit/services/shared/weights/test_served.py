"""Models that SGLang computes otherwise than their configuration says."""

import re
from typing import Any

import pytest

from gspo_services.shared.weights import ServedError, require_served


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "qwen3", "sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21,
         "num_hidden_layers": 28},
        {"model_type": "qwen3_moe", "sliding_window": 4096, "use_sliding_window": True},
    ],
)  # fmt: skip
def test_a_window_that_sglang_ignores_is_refused_if_a_sequence_can_outgrow_it(config: dict[str, Any]) -> None:
    require_served(config, 4096, on_cpu=True)
    named = rf"{config['model_type']} with a window of 4,096 tokens .* up to 4,097 tokens .* at most 4096"
    with pytest.raises(ServedError, match=named):
        require_served(config, 4097, on_cpu=False)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_moe"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen3", "sliding_window": 4096, "layer_types": ["full_attention"] * 2},
        # As Qwen2.5 has it.
        {"model_type": "qwen2", "sliding_window": 32_768, "use_sliding_window": False, "max_window_layers": 21,
         "num_hidden_layers": 28},
        {"model_type": "qwen2", "sliding_window": 32_768, "use_sliding_window": True, "max_window_layers": 28,
         "num_hidden_layers": 28},
        {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": ["sliding_attention"]},
        {"model_type": "mistral", "sliding_window": "broken"},
        {},
    ],
)  # fmt: skip
def test_other_models_are_served_as_they_are(config: dict[str, Any]) -> None:
    require_served(config, 1_000_000, on_cpu=True)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_what_needs_a_kernel_for_gpus_is_refused_on_a_cpu(kind: str) -> None:
    require_served({"model_type": kind}, 100, on_cpu=False)
    with pytest.raises(ServedError, match=re.escape(f"a model of type {kind} on a CPU") + ".* use a GPU or another model"):
        require_served({"model_type": kind}, 100, on_cpu=True)
