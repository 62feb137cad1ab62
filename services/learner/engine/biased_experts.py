"""gpt-oss's experts shared by ranks: with biases, and gate and up interleaved, which DeepSpeed 0.19.8 drops and mixes up.

A rank's share keeps the names and the layout of transformers: rows of each parameter. AutoEP chooses experts and exchanges
tokens as for other families. This relies on:

    auto_ep_layer.AutoEPMoELayer               made by this name for each layer with experts, with the one that it replaces
    AutoEPMoELayer.experts                     called with tokens in order of their experts, and the number of each
    auto_ep_layer.collect_replacement_sources  says which of the optimizer's parameters new ones take the place of
    AutoEPMoELayer.return_router_logits        the layer returns a pair, as gpt-oss's does
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import deepspeed
import torch
from deepspeed.module_inject import auto_ep_layer
from torch import Tensor, nn

_FAMILY: Final = "gpt_oss"
_PARAMETERS: Final = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@contextmanager
def fitting_layers(model_type: str) -> Iterator[None]:
    """Inside, DeepSpeed makes layers that compute a model of this type."""
    if model_type != _FAMILY:
        yield
        return
    before = auto_ep_layer.AutoEPMoELayer, auto_ep_layer.collect_replacement_sources
    auto_ep_layer.AutoEPMoELayer, auto_ep_layer.collect_replacement_sources = BiasedLayer, _sources
    try:
        yield
    finally:
        auto_ep_layer.AutoEPMoELayer, auto_ep_layer.collect_replacement_sources = before


class BiasedLayer(auto_ep_layer.AutoEPMoELayer):
    """AutoEP's layer with such experts."""

    def __init__(self, spec: Any, source_module: nn.Module, ep_size: int, ep_rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, source_module, ep_size, ep_rank, *args, **kwargs)
        marked, number = self.get_parameter("experts.w1"), self.num_local_experts
        experts = BiasedExperts(source_module.experts, ep_rank * number, number)
        for parameter in experts.parameters():
            for mark in ("allreduce", "group_name", "ds_zero_placement_family", "ds_zero_partition_group_name"):
                setattr(parameter, mark, getattr(marked, mark))
        self.experts = experts
        self.return_router_logits = True


class BiasedExperts(nn.Module):
    """Some of a layer's experts: [E / n, H, 2I], [E / n, 2I], [E / n, I, H], [E / n, H]."""

    def __init__(self, source: Any, first: int, number: int) -> None:
        """``source``: transformers' module of all experts, partitioned or not."""
        super().__init__()
        self.alpha, self.limit = source.alpha, source.limit
        self._activation = type(source)._apply_gate
        whole = [source.get_parameter(name) for name in _PARAMETERS]
        with deepspeed.zero.GatheredParameters(whole):
            for name, parameter in zip(_PARAMETERS, whole, strict=True):
                own = parameter.detach()[first : first + number].clone()
                self.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        """tokens: [N, H], those of the first expert first; ``numbers`` [E / n] of each. More at the end belong to none."""
        ends = numbers.cumsum(0, dtype=torch.int32)
        places = torch.arange(len(tokens), device=tokens.device)
        experts = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        belongs = (places < ends[-1])[:, None]

        def through(values: Tensor, projection: str) -> Tensor:
            weight, bias = (self.get_parameter(name).to(values.dtype) for name in (projection, f"{projection}_bias"))
            # Rows that belong to none are not written: of the product, and in backward of the gradient of the values.
            product = torch._grouped_mm(torch.where(belongs, values, 0), weight, offs=ends)
            return torch.where(belongs, product, 0) + bias[experts]

        return through(self._activation(self, through(tokens, "gate_up_proj")), "down_proj")


def _sources(source: nn.Module, replacement: nn.Module, *_: Any) -> auto_ep_layer.ReplacementSourceMap:
    found = auto_ep_layer.ReplacementSourceMap()
    found.discarded = {id(parameter) for parameter in source.parameters()}
    own, others = source.get_submodule("experts"), source.get_submodule("router")
    for new, old in ((replacement.get_submodule("experts"), own), (replacement.get_submodule("router.gate"), others)):
        found.sources |= {id(parameter): [old.get_parameter(name)] for name, parameter in new.named_parameters()}
    return found
