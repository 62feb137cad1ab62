"""The mixture of experts that a config.json describes: one reading for learner, rollouts, checks and estimates.

Families have names of their own for the same numbers. They are those of transformers 5.19 and of the published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_WIDTH: Final = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED_WIDTH: Final = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim")
_SHARED: Final = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
FLOAT32_ROUTERS: Final = frozenset({"glm4_moe", "glm4_moe_lite", "minimax_m2"})
"""Model types whose routers are float32 in SGLang whatever the model is in."""
BIASED_ROUTERS: Final = frozenset({"deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "minimax_m2"})
"""Model types whose routers choose by scores plus a bias without gradient, and were tried with one that moves."""
EXPERTS_ATTRIBUTE: Final = "num_local_experts"
"""Under which every configuration object of transformers has the number of experts."""
_SWITCHES: Final = ("is_moe", "enable_moe_block")
"""Keys with which a configuration that names experts may say that there are none."""
_DENSE_LAYER, _EXPERT_BLOCK = "dense", "moe"
_LARGEST: Final = 2**40
MOST_LAYERS: Final = 10_000
_ROUTERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}
"""What a key may say of a router, of any model."""
_BIASED: Final[Mapping[str, tuple[Any, ...]]] = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
"""The same of families whose class in transformers has one kind of router and ignores the key: with another value SGLang
would compute another model."""
_ROUTERS_OF: Final = dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2"), _BIASED)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The experts of a model, or that it has none."""

    experts: int = 0
    """Of a layer, among which its router chooses; 0: a dense model."""
    chosen: int = 0
    """For each token."""
    width: int = 0
    """Of an expert's MLP."""
    shared_width: int = 0
    """Of the MLP that every token has besides; 0: none."""
    shared_gate: bool = False
    """It has a gate of its own, as in Qwen's families."""
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts."""

    def __bool__(self) -> bool:
        return self.experts > 0


def mixture_of(config: Mapping[str, Any]) -> Mixture:
    """Read it from config.json, or ``config.to_dict()``.

    Raises: ValueError, which names a key whose value is no number, or which asks for a router that nobody computes.
    """
    experts = _first(config, _EXPERTS)
    if not experts or any(config.get(key) is False for key in _SWITCHES):
        return Mixture()
    width, chosen = _first(config, _WIDTH), _first(config, _CHOSEN) or experts
    _require_router(config, experts, chosen)
    return Mixture(
        experts=experts,
        chosen=chosen,
        width=width,
        # Qwen gives the width of its shared expert; GLM and DeepSeek their number, each as wide as the others.
        shared_width=_first(config, _SHARED_WIDTH) or _first(config, _SHARED) * width,
        shared_gate=bool(config.get(_SHARED_WIDTH[0])),
        dense_layers=_dense_layers(config, _layers(config)),
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Those listed, the first ones, and those between the ones with experts."""
    kinds, sparse, period = (config.get(key) for key in ("mlp_layer_types", "moe_layers", "expert_layer_period"))
    blocks = config.get("layers_block_type")
    if isinstance(kinds, list):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == _DENSE_LAYER)
    if isinstance(blocks, list):
        return frozenset(layer for layer, kind in enumerate(blocks) if kind != _EXPERT_BLOCK)
    if isinstance(sparse, list):
        return frozenset(range(layers)) - frozenset(sparse)
    if period:
        step, first = _number("expert_layer_period", period), _first(config, ("expert_layer_offset",))
        return frozenset(layer for layer in range(layers) if layer % step != first)
    given = config.get("mlp_only_layers")
    listed = given if isinstance(given, list) else []
    step = _first(config, ("decoder_sparse_step",)) or 1
    first = _first(config, ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"))
    return frozenset(layer for layer in range(layers) if layer in listed or layer < first or (layer + 1) % step)


def _require_router(config: Mapping[str, Any], experts: int, chosen: int) -> None:
    for key, known in _ROUTERS_OF.get(str(config.get("model_type")), _ROUTERS).items():
        value = config.get(key)
        if value is not None and value not in known:
            raise ValueError(
                f"{key} is {str(value)[:100]}: routers of this model are computed with {' or '.join(map(str, known))}; "
                "correct config.json, or use another model"
            )
    if chosen > experts:
        raise ValueError(f"{chosen} experts a token of {experts} in a layer: there are not so many; correct config.json")
    groups, limited = _first(config, ("n_group",)) or 1, _first(config, ("topk_group",)) or 1
    if experts % groups or limited > groups:
        raise ValueError(
            f"n_group is {groups} and topk_group {limited}: {experts} experts cannot be chosen so; correct config.json"
        )


def _layers(config: Mapping[str, Any]) -> int:
    layers = _number("num_hidden_layers", config.get("num_hidden_layers") or 0)
    if layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}: at most {MOST_LAYERS:,} are read; correct config.json")
    return layers


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The value of the first of these keys that has one; 0: none."""
    found = next((key for key in keys if config.get(key)), None)
    return 0 if found is None else _number(found, config[found])


def _number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError(f"{key} is {str(value)[:100]}: expected a number from 1 up; correct config.json")
    return value
