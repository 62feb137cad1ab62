"""DeepSpeed's AutoEP by families: which it computes exactly, with what it has to be told of them, and why not others.

A family is here once its logits, gradients, exports and resumed runs were compared with those of the plain model. The
experts of gpt-oss are computed in ``gspo_services.learner.engine.biased_experts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo.moe.mixture import EXPERTS_ATTRIBUTE

_STACKED: Final = {
    "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
    "router_pattern": "gate",
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "num_experts_attr": EXPERTS_ATTRIBUTE,
    "top_k_attr": "num_experts_per_tok",
}
"""Experts as transformers stacks them."""
_GLM: Final = {
    **_STACKED,
    "score_func": "sigmoid",
    "has_shared_experts": True,
    "shared_experts_pattern": "shared_experts",
}
_QWEN_SHARED: Final = {
    "has_shared_experts": True,
    "shared_experts_pattern": "shared_expert",
    "shared_experts_gate_pattern": "shared_expert_gate",
}
AUTOEP_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_moe": {"preset_model": "qwen3_moe"},
    "qwen2_moe": {"preset_model": "qwen3_moe", **_QWEN_SHARED},
    "qwen3_next": {**_STACKED, "score_func": "softmax", **_QWEN_SHARED},
    "qwen3_5_moe_text": {"preset_model": "qwen3_5_moe", **_QWEN_SHARED},
    "mixtral": {"preset_model": "mixtral"},
    "deepseek_v3": {"preset_model": "deepseek_v3"},
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "dots1": _GLM,
    "minimax_m2": {**_STACKED, "score_func": "sigmoid"},
    "olmoe": {**_STACKED, "score_func": "softmax"},
    "gpt_oss": {**_STACKED, "router_pattern": "router", "score_func": "softmax", "expert_activation": "swiglu_oai"},
    "granitemoe": {
        **_STACKED,
        "moe_layer_pattern": r"model\.layers\.\d+\.block_sparse_moe",
        "router_pattern": "router",
        "score_func": "softmax",
    },
}
"""By ``model_type``: as DeepSpeed's section has it. Names of routers and shared experts are those in transformers."""
BIAS_BESIDE_ROUTER: Final = frozenset({"minimax_m2"})
"""Model types whose routers' bias is a buffer of the layer, not of the router."""
_TAKES_PAIRS: Final = "applies the router's weights to the experts' output, where Llama 4 applies them to their input"
AUTOEP_FAILURES: Final[Mapping[str, str]] = {
    "llama4": _TAKES_PAIRS,
    "llama4_text": _TAKES_PAIRS,
    "nemotron_h": "needs experts with a gate, which Nemotron-H has not",
}
"""By ``model_type``: what AutoEP does with families that it cannot compute."""
AUTOEP_TRIED: Final = "0.19.8"
"""The release of DeepSpeed that all this is about."""


def autoep_config(size: int, model_config: Mapping[str, Any], *, on_cuda: bool) -> dict[str, Any]:
    """DeepSpeed's "expert_parallel" section, for a model that passed ``require_supported``."""
    groups = int(model_config.get("n_group") or 1)
    return {
        "enabled": True,
        "autoep_size": size,
        **AUTOEP_FAMILIES[str(model_config["model_type"])],
        # A preset would always normalise. Mixtral does, and says nothing of it.
        "route_norm": bool(model_config.get("norm_topk_prob", True)),
        **({"num_expert_groups": groups, "num_limited_groups": model_config["topk_group"]} if groups > 1 else {}),
        # How many tokens each rank sends is copied to the host while the tokens are packed, not before it.
        "async_split_plan": on_cuda,
    }
