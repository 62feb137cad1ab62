"""Models that SGLang computes otherwise than their configuration says."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from gspo_services.shared.weights import ServedError, require_served, require_served_on_cuda
from gspo_services.shared.weights.served import IGNORED_TIES


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


@pytest.mark.parametrize("kind", IGNORED_TIES)
def test_a_tied_head_is_refused_where_sglangs_class_has_one_of_its_own(kind: str) -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "srt" / "models" / f"{kind}.py"
    assert "tie_word_embeddings" not in source.read_text(encoding="utf-8")
    require_served({"model_type": kind, "tie_word_embeddings": False}, 100, on_cpu=False)
    with pytest.raises(ServedError, match=rf"of type {kind} whose output layer is its embedding .*; write it as lm_head"):
        require_served({"model_type": kind, "tie_word_embeddings": True}, 100, on_cpu=False)


@pytest.mark.parametrize("kind", ["gemma2"])
def test_what_needs_a_kernel_for_gpus_is_refused_on_a_cpu(kind: str) -> None:
    require_served({"model_type": kind}, 100, on_cpu=False)
    with pytest.raises(ServedError, match=re.escape(f"a model of type {kind} on a CPU") + ".* use a GPU or another model"):
        require_served({"model_type": kind}, 100, on_cpu=True)


def test_what_sglangs_kernels_for_cuda_lack_is_refused_with_ways_out() -> None:
    tiny = {"model_type": "qwen3_moe", "head_dim": 16}
    with pytest.raises(
        ServedError, match=r'model.dtype is float32.*learner.dtype to "bfloat16", or .*CUDA_VISIBLE_DEVICES= '
    ):
        require_served_on_cuda({"model_type": "llama"}, "float32", [])
    with pytest.raises(ServedError, match=r"head_dim is 16.*64, 128, 256, 512; .*--for-gpu.*CUDA_VISIBLE_DEVICES= "):
        require_served_on_cuda(tiny, "bfloat16", ["--mem-fraction-static", "0.3"])
    for given in (["--dtype", "float16"], ["--dtype=float16"]):
        require_served_on_cuda(tiny, "float32", given)
    for config in (
        {"model_type": "qwen3_moe", "head_dim": 64},
        {"model_type": "qwen3", "head_dim": 16},
        {"head_dim": "?"},
        {},
    ):
        require_served_on_cuda(config, "bfloat16", [])
