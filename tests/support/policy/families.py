"""Tiny random models of today's families, in the files that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from gspo.model_files.configuration import READ_AS
from tests.support.learner.tiny_model import TINY_EOS_TOKEN_ID, TINY_VOCAB_SIZE

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": TINY_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "eos_token_id": TINY_EOS_TOKEN_ID, "bos_token_id": 0, "pad_token_id": 5, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
_SIGMOID: Final[dict[str, Any]] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_intermediate_size": 32,
}  # fmt: skip
_STRETCHED: Final[dict[str, Any]] = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10_000.0,
}  # fmt: skip
"""As published: without it SGLang's latent attention does not start on a CPU."""
# fmt: off
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16},
    "mixtral": {"num_local_experts": 8, "sliding_window": None, "head_dim": 16},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 4},
    "glm4_moe": {**_SIGMOID, "use_qk_norm": True, "attention_bias": True, "head_dim": 16},
    "glm4_moe_lite": {**_SIGMOID, **_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": {
        **_SIGMOID, **_LATENT, "n_group": 2, "rope_parameters": _STRETCHED, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1,
    },
}
# fmt: on
"""By ``model_type``: what its configuration has beside what all have."""
_LINEAR: Final[dict[str, Any]] = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
}  # fmt: skip
_LINEAR_MOE: Final[dict[str, Any]] = {
    **_LINEAR, "num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
# fmt: off
MORE_SHARED: Final[dict[str, dict[str, Any]]] = {
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_next": _LINEAR_MOE,
    "qwen3_5_moe_text": _LINEAR_MOE,
    "gpt_oss": {
        "num_local_experts": 8, "head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 128, "rope_theta": 150_000.0,
        },
    },
    "dots1": {**_SIGMOID, "num_key_value_heads": 4, "head_dim": 16, "n_group": 2},
    "minimax_m2": {
        "num_local_experts": 8, "intermediate_size": 32, "head_dim": 16, "rotary_dim": 8, "use_qk_norm": True,
        "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    "granitemoe": {
        "num_local_experts": 8, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625, "tie_word_embeddings": True,
    },
}
# fmt: on
"""The same of more families whose experts ranks share."""
KIMI: Final = "kimi_k2"
_DENSE: Final = {"qwen3_5_text": _LINEAR}
SERVED: Final = sorted({*FAMILIES, *MORE_SHARED, *_DENSE} - {"dots1", "qwen2_moe"})
"""Families that are compared with an engine."""


def family_config(kind: str) -> dict[str, Any]:
    """Its config.json, without what transformers fills in."""
    return {"model_type": kind, **_COMMON, **(FAMILIES | MORE_SHARED | _DENSE)[kind]}


def _middle(kind: str, name: str) -> float:
    """Around which a vector's values lie: scales of norms are added to one in some families, and a state fades slowly."""
    if name.endswith("A_log"):
        return -2.0
    added = kind.startswith(("qwen3_5", "qwen3_next")) and not name.endswith("linear_attn.norm.weight")
    return 0.0 if added or name.endswith("bias") else 1.0


def save_family(directory: Path, kind: str, seed: int = 0) -> Any:
    """Write a checkpoint in float32; return the model. Its routers and answers differ more than those of a new model.

    ``kind``: of ``FAMILIES``, or ``KIMI``, which is DeepSeek-V3 in a config.json with code of its own.
    """
    if kind == KIMI:
        model = save_family(directory, READ_AS[KIMI], seed)
        path = directory / "config.json"
        own = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": KIMI, "auto_map": own}))
        return model
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family_config(kind))).float().eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.05 * torch.randn_like(value))
            elif isinstance(value, torch.nn.Parameter):
                wide = 0.3 if "embed" in name or "lm_head" in name else 0.12
                value.normal_(0.0, wide) if value.dim() >= 2 else value.normal_(_middle(kind, name), 0.1)
    model.save_pretrained(directory)
    write_dropped(directory, kind)
    return model


def write_dropped(directory: Path, kind: str) -> None:
    """Write keys into config.json that are published, read by SGLang, and dropped by transformers."""
    config = family_config(kind)
    dropped = {key: config[key] for key in ("full_attention_interval",) if key in config}
    written = directory / "config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), **dropped}, indent=2))
