"""Which adapters a model can have with these settings, decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.model_files.text_model import is_tower
from gspo.moe.mixture import mixture_of
from gspo_services.learner.start.long_context import LINEAR_ATTENTION
from gspo_services.shared.settings import Learner, LoraSection


def require_adaptable(
    model_config: Mapping[str, Any], lora: LoraSection, learner: Learner, *, moves_biases: bool = False
) -> None:
    """Raises: ValueError, which names the value and what to do, when ``lora`` cannot be trained.

    ``model_config``: the model's config.json, or ``config.to_dict()``. ``moves_biases``: of the routers, with the load.
    """
    if not lora.is_used:
        return
    kind, there = str(model_config.get("model_type", "")), _kinds(model_config)
    for target in lora.target_modules:
        if target == "mlp" and mixture_of(model_config).dense_layers:
            raise ValueError(
                f"lora.target_modules names 'mlp' and some layers of this {kind} model have experts, for which peft would "
                f"take the names of the others; name some of {', '.join(there)}"
            )
        if target not in there:
            raise ValueError(
                f"lora.target_modules names {target!r} and a {kind} model of this configuration has none; name some of "
                f"{', '.join(there)}"
            )
    if learner.router_rate_factor not in (0, 1):
        raise ValueError(
            f"router_rate_factor is {learner.router_rate_factor:g} and lora.rank is {lora.rank}: adapters leave the routers "
            "as they are; set learner.router_rate_factor = 1"
        )
    if moves_biases:
        raise ValueError(
            f"expert_bias_rate is above 0 and lora.rank is {lora.rank}: adapters leave the routers as they are; set "
            "objective.expert_bias_rate = 0"
        )
    if lora.publish == "adapter" and is_tower(model_config):
        raise ValueError(
            f"lora.publish is 'adapter' and the model is a {model_config['architectures'][0]}: engines know the layers of "
            'its text model by other names than adapters have; set lora.publish = "merged"'
        )
    if lora.publish == "adapter" and (reason := _unpublished(model_config)):
        raise ValueError(
            f"lora.publish is 'adapter' and a {kind} model has {reason}: SGLang's slots have q, k, v and o of every layer; "
            'set lora.publish = "merged"'
        )
    size = learner.expert_parallel
    if size > 1 and "experts" in lora.target_modules:
        raise ValueError(
            f"lora.target_modules names 'experts' and expert_parallel is {size}: peft does not find the experts that "
            "DeepSpeed shares out; use expert_parallel = 1, or leave 'experts' out"
        )
    if size > 1 and learner.zero_stage in (1, 2):
        raise ValueError(
            f"lora.rank is {lora.rank}, expert_parallel is {size} and zero_stage is {learner.zero_stage}: DeepSpeed wants "
            "experts in the optimizer there, and they are frozen; use zero_stage = 3 or 0, or expert_parallel = 1"
        )


def _unpublished(config: Mapping[str, Any]) -> str:
    """What keeps adapters of attention from being versions; empty: nothing."""
    if config.get("kv_lora_rank"):
        return "latent attention"
    layers = config.get("layer_types")
    return "layers of linear attention" if LINEAR_ATTENTION in (layers if isinstance(layers, list) else ()) else ""


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the targets that a decoder of this configuration has."""
    return ["attention", "experts" if mixture_of(config) else "mlp"]
