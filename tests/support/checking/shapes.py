"""config.json of known models, as their makers publish them."""

from typing import Any

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "tie_word_embeddings": True, "attention_bias": False, "max_position_embeddings": 40960, "use_sliding_window": False,
    "sliding_window": None, "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = QWEN3_06B | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
TINY: dict[str, Any] = QWEN3_30B | {
    "vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 2048, "eos_token_id": 256,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
