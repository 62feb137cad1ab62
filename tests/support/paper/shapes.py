"""config.json of large mixtures of experts, as their makers publish them."""

from __future__ import annotations

from typing import Any, Final

from tests.support.checking.shapes import MIXTRAL_8X7B, QWEN3_06B, QWEN3_8B, QWEN3_30B

MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_30B
    | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False, "tie_word_embeddings": False,
        "norm_topk_prob": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "hidden_act": "silu",
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "num_hidden_layers": 92,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False,
        "norm_topk_prob": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "hidden_act": "silu",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "hidden_act": "silu", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
}  # fmt: skip
MODELS["Kimi-K2"] = MODELS["DeepSeek-V3"] | {
    "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "routed_scaling_factor": 2.827,
}  # fmt: skip
"""As its config.json is read, which calls it kimi_k2."""
MODELS["gpt-oss-20b"] = MODELS["gpt-oss-120b"] | {"num_hidden_layers": 24, "num_local_experts": 32}
_LINEAR: Final[dict[str, Any]] = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
MODELS["Qwen3-Next-80B-A3B"] = _LINEAR | {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS["Qwen3.5-35B-A3B"] = _LINEAR | {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
MODELS["Qwen3.5-9B"] = _LINEAR | {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "intermediate_size": 12288,
}  # fmt: skip
MODELS["MiniMax-M2"] = {
    "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536,
    "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_qk_norm": True,
    "tie_word_embeddings": False, "max_position_embeddings": 196608, "hidden_act": "silu",
}  # fmt: skip
MODELS["Gemma-3-12B"] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 15360,
    "sliding_window": 1024, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
