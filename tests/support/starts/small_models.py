"""Small random models of the families that are trained, as folders of several safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

KINDS: Final = ("qwen3_moe", "mixtral", "qwen3_tied", "llama")
_DENSE: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def small_model(kind: str, **changes: Any) -> Any:
    """A float32 model of one of ``KINDS``; ``changes`` of its configuration."""
    import torch
    import transformers

    moe = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8}
    name, own = {
        "qwen3_moe": ("Qwen3Moe", moe),
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 8}),
        "llama": ("Llama", {}),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**(_DENSE | own | changes))
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms are ones otherwise, as they are in a model whose norms nobody has read.
            parameter.normal_(0.0, 0.1)
    return model


def save_small_model(directory: Path, kind: str, dtype: str = "float32", **changes: Any) -> None:
    """Write ``small_model`` into several files."""
    import torch

    small_model(kind, **changes).to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="40KB")
