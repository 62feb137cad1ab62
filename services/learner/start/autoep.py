"""DeepSpeed's AutoEP by families: which it computes exactly, with what it has to be told of them.

A family is here once its logits, gradients, exports and resumed runs were compared with those of the plain model. Not here:
gpt-oss, whose biases of experts AutoEP drops without a word, and whose gate and up projections it takes for two halves where
they are interleaved; Llama 4, whose router acts on the experts' input; Nemotron-H, whose experts have no gate.
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
AUTOEP_FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_moe": {"preset_model": "qwen3_moe"},
    "mixtral": {"preset_model": "mixtral"},
    "deepseek_v3": {"preset_model": "deepseek_v3"},
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "olmoe": {**_STACKED, "score_func": "softmax"},
}
"""By ``model_type``."""


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
