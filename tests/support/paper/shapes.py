"""config.json of large mixtures of experts, as their makers publish them."""

from __future__ import annotations

from typing import Any, Final

from tests.support.checking.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B

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
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
}  # fmt: skip
