"""DeepSpeed's AutoEP on this rank: which experts it holds, the names of its modules, and whole parameters for export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import deepspeed
import torch
import torch.distributed
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups
from torch import Tensor, nn

from gspo.model.serving import is_partitioned
from gspo_services.learner.start import AUTOEP_FAMILIES, BIAS_BESIDE_ROUTER

CORRECTION_BIAS: Final = "e_score_correction_bias"


@dataclass(frozen=True)
class ExpertShare:
    """The part of a layer's experts that this rank's slabs hold."""

    group: Any
    """The process group that holds all experts of a layer, one share on each member."""
    index: int
    """This share's place in the group."""
    num_shares: int
    replicas: Any = None
    """The process group whose members hold the same share; None: all ranks."""


WHOLE = ExpertShare(group=None, index=0, num_shares=1)
"""The share of a parameter that every rank holds whole (ZeRO's partitions aside)."""


def keep_names(model: nn.Module, model_type: str) -> None:
    """Give modules and buffers of AutoEP's layers the names that they have in transformers, and so in checkpoints.

    AutoEP finds them as before: attributes are looked up first among those of the object itself, then among its modules.
    """
    layers = [module for module in model.modules() if isinstance(module, AutoEPMoELayer)]
    if not layers:
        return
    family = AUTOEP_FAMILIES[model_type]
    for layer in layers:
        # Nobody reads the logits that some presets return, too.
        layer.return_router_logits &= layer.router_logits_capture_target != "router"
        router, gate = layer.router, layer.router.gate
        _rename(layer, "router", family.get("router_pattern", "gate"))
        for name in ("shared_experts", "shared_experts_gate"):
            if getattr(layer, name) is not None:
                _rename(layer, name, family.get(f"{name}_pattern", name))
        vars(router)["gate"] = router._modules.pop("gate")
        for name, parameter in gate.named_parameters():
            router.register_parameter(name, parameter)
        if model_type in BIAS_BESIDE_ROUTER:
            bias = router._buffers.pop(CORRECTION_BIAS)
            vars(router)[CORRECTION_BIAS] = bias
            layer.register_buffer(CORRECTION_BIAS, bias)


def _rename(parent: nn.Module, name: str, own_name: str) -> None:
    vars(parent)[name] = parent._modules[own_name] = parent._modules.pop(name)


def expert_shares(model: nn.Module) -> dict[int, ExpertShare]:
    """Return the shares of all expert slabs, by id of the parameter; empty without expert parallelism."""
    shares: dict[int, ExpertShare] = {}
    for module in model.modules():
        if isinstance(module, AutoEPMoELayer):
            group = module.ep_group
            share = ExpertShare(
                group=group,
                index=torch.distributed.get_rank(group),
                num_shares=torch.distributed.get_world_size(group),
                replicas=groups._get_expert_data_parallel_group(module.ep_group_name),
            )
            shares |= {id(parameter): share for parameter in module.experts.parameters()}
    return shares


@contextmanager
def gathered(value: Tensor, shares: Mapping[int, ExpertShare]) -> Iterator[Tensor | None]:
    """Gather a whole parameter or buffer from all ZeRO partitions and all experts. Collective.

    None on ranks that need not emit it: those outside rank 0's group of experts, and all but the first inside it.
    """
    with deepspeed.zero.GatheredParameters([value], enabled=is_partitioned(value)):
        share = shares.get(id(value), WHOLE)
        yield value if share.num_shares == 1 else _all_experts(value.detach(), share)


def _all_experts(local: Tensor, share: ExpertShare) -> Tensor | None:
    """Gather [E / n, ...] into [E, ...] on rank 0, which is the first of its group."""
    # Every group holds all experts; only rank 0's gathers them.
    if torch.distributed.get_process_group_ranks(share.group)[0] != 0:
        return None
    parts = [torch.empty_like(local) for _ in range(share.num_shares)] if share.index == 0 else None
    torch.distributed.gather(local.contiguous(), parts, dst=0, group=share.group)
    return None if parts is None else torch.cat(parts)
