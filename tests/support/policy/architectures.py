"""Tiny random models of today's architectures, from transformers' configurations."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GRANITE: dict[str, Any] = {
    "logits_scaling": 6.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2, window": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2, **LAYERS}),
    "Qwen3, window": ("Qwen3", {"use_sliding_window": True, **LAYERS}),
    "Mistral, window": ("Mistral", {"sliding_window": 7}),
    "Gemma 2": ("Gemma2", {**LAYERS, "query_pre_attn_scalar": 8, **CAPS}),
    "Gemma 3": ("Gemma3", {**LAYERS, "query_pre_attn_scalar": 8}),
    "Cohere 2": ("Cohere2", {**LAYERS, "logit_scale": 0.25}),
    "Granite": ("Granite", {**GRANITE}),
    "Granite, experts": ("GraniteMoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-Next": ("Qwen3Next", {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("Qwen3_5", {**LINEAR, "tie_word_embeddings": True}),
    "Qwen3.5, experts": ("Qwen3_5Moe", {**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 16}),
}
"""By name: the class, and what its configuration adds to the shape."""


def tiny_model(name: str, seed: int = 0, **others: Any) -> Any:
    """A float32 model whose distribution is far from flat; ``others``: settings of its configuration in place of its own."""
    import torch
    import transformers

    family, changes = ARCHITECTURES[name]
    config = _config(transformers, family)(**SHAPE | changes | others)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.15, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def _config(transformers: Any, family: str) -> Any:
    """Families with images keep the language model's configuration in a class of its own."""
    return getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
