"""Decides, before anything is loaded, which models, numbers of ranks and settings can be trained together.

DeepSpeed would notice only after minutes, on some ranks, or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gspo.moe.mixture import BIASED_ROUTERS, mixture_of
from gspo_services.learner.start.autoep import AUTOEP_FAILURES, AUTOEP_FAMILIES, AUTOEP_TRIED
from gspo_services.shared.estimates import ShapeError, live_elements, shape_of

PREFETCHED_ELEMENTS: Final = 50_000_000
"""DeepSpeed's default of stage3_prefetch_bucket_size."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The properties of a model and its settings that decide how it can be split over ranks."""

    num_ranks: int
    expert_parallel: int
    """Ranks that share a layer's experts; 1: every rank has all of them."""
    routing_replay: bool
    model_type: str
    num_experts: int
    """Experts of a layer; 0 for a dense model."""
    hidden_act: str = "silu"
    load_balance: bool = False
    """Whether an auxiliary loss needs the routers' logits."""
    scales_routers: bool = False
    """Whether routers have a learning rate of their own."""
    moves_biases: bool = False
    """Whether the routers' biases move against the load of experts."""


def parallelism_of(
    model_config: Mapping[str, Any],
    *,
    num_ranks: int,
    expert_parallel: int,
    routing_replay: bool,
    load_balance: bool = False,
    scales_routers: bool = False,
    moves_biases: bool = False,
) -> Parallelism:
    """Read them from the model's config.json, or ``config.to_dict()``."""
    return Parallelism(
        num_ranks=num_ranks,
        expert_parallel=expert_parallel,
        routing_replay=routing_replay,
        load_balance=load_balance,
        scales_routers=scales_routers,
        moves_biases=moves_biases,
        model_type=str(model_config.get("model_type", "")),
        num_experts=mixture_of(model_config).experts,
        hidden_act=str(model_config.get("hidden_act", "silu")),
    )


def require_supported(plan: Parallelism) -> None:
    """Raises: ValueError, which names the value and what to do, when training would fail later or train wrongly."""
    if plan.routing_replay and plan.num_experts == 0:
        raise ValueError(
            f"routing_replay is on and a {plan.model_type} model has no routers: routing replay needs a mixture of experts; "
            "set objective.routing_replay = false"
        )
    if plan.load_balance and plan.num_experts == 0:
        raise ValueError(
            f"load_balance_coefficient is above 0 and a {plan.model_type} model has no routers: a load-balancing loss needs "
            "a mixture of experts; set objective.load_balance_coefficient = 0"
        )
    if plan.scales_routers and plan.num_experts == 0:
        raise ValueError(
            f"router_rate_factor is not 1 and a {plan.model_type} model has no routers: their learning rate needs a mixture "
            "of experts; set learner.router_rate_factor = 1"
        )
    if plan.moves_biases and plan.model_type not in BIASED_ROUTERS:
        raise ValueError(
            f"expert_bias_rate is above 0 and model_type is {plan.model_type!r}: routers with a bias that can be moved are "
            f"known of {', '.join(sorted(BIASED_ROUTERS))}; set objective.expert_bias_rate = 0"
        )
    size = plan.expert_parallel
    if size < 1:
        raise ValueError(f"expert_parallel is {size}; it must be 1 (off) or a number of ranks")
    if size == 1:
        return
    if plan.num_experts == 0:
        raise ValueError(f"expert_parallel is {size} and a {plan.model_type} model has no experts; use expert_parallel = 1")
    if plan.model_type not in AUTOEP_FAMILIES:
        failure = AUTOEP_FAILURES.get(plan.model_type)
        known = (
            f"DeepSpeed's AutoEP (tried with {AUTOEP_TRIED}) {failure}"
            if failure
            else (f"it was compared with the plain model for {', '.join(AUTOEP_FAMILIES)} alone")
        )
        raise ValueError(
            f"expert_parallel is {size} and model_type is {plan.model_type!r}: {known}; use expert_parallel = 1, and "
            "zero_stage 3 if the experts do not fit"
        )
    if plan.hidden_act != "silu":
        # AutoEP computes silu whatever the configuration says.
        raise ValueError(
            f"expert_parallel is {size} and hidden_act is {plan.hidden_act!r}; it must be silu, or expert_parallel 1"
        )
    for what, number in (("the model's experts", plan.num_experts), ("learner.num_ranks", plan.num_ranks)):
        if number % size:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(f"expert_parallel is {size}, which does not divide {what} ({number}); use one of {fitting}")


def gathering_config(model_config: Mapping[str, Any], expert_parallel: int) -> dict[str, int]:
    """DeepSpeed's entries of "zero_optimization" for what ZeRO 3 gathers: the next layer, while this one computes.

    DeepSpeed's own limits are of dense models: 10^9 live elements, and 5 x 10^7 fetched ahead. A layer of 128 experts has
    6 x 10^8: no second one would be gathered before the first is freed. Nothing for a model of unknown shape.
    """
    try:
        layer = shape_of(model_config).gathered_layer(expert_parallel)
    except ShapeError:
        return {}
    return {
        "stage3_max_live_parameters": live_elements(layer),
        "stage3_prefetch_bucket_size": max(PREFETCHED_ELEMENTS, layer),
    }


def offload_config(offload: str, *, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's entries of "zero_optimization" for ``learner.offload``; none for "none"."""
    sections = {
        "none": (),
        "optimizer": ("offload_optimizer",),
        "optimizer_and_parameters": ("offload_optimizer", "offload_param"),
    }
    return {section: {"device": "cpu", "pin_memory": pin_memory} for section in sections[offload]}
