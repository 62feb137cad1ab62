"""Saves activation memory: MLPs in tiles of tokens, and checkpoints of layers in the host's memory.

Both compute the same numbers. Every rank makes the same number of calls whatever its tokens, because under ZeRO-3 each call
of a module is a collective.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tile_mlps(model: nn.Module, tiles: int) -> int:
    """Make the model's gated MLPs compute ``tiles`` slices of their tokens one after the other, and again in backward.

    Then only one slice's hidden values exist at a time: 1 / tiles of what a whole row needs. Returns the number of MLPs.
    """
    found = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in _PROJECTIONS)
    ]
    for module in found:
        module.forward = types.MethodType(_tiled(type(module).forward, tiles), module)
    return len(found)


def _tiled(forward: Callable[..., Any], tiles: int) -> Callable[..., Any]:
    def in_tiles(self: nn.Module, hidden_states: Tensor) -> Tensor:
        parts = hidden_states.tensor_split(tiles, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([forward(self, part) for part in parts], dim=-2)
        outputs = [checkpoint(forward, self, part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.cat(outputs, dim=-2)

    return in_tiles


def keep_checkpoints_on_host(model: nn.Module) -> None:
    """Keep each checkpointed layer's input in the host's memory until backward; needs activation checkpointing."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            # transformers calls this instead of a layer.
            vars(module)["_gradient_checkpointing_func"] = _checkpoint_on_host


def _checkpoint_on_host(layer: Callable[..., Any], hidden_states: Tensor, *others: Any) -> Any:
    device = hidden_states.device

    def from_host(kept: Tensor, *others: Any) -> Any:
        return layer(kept.to(device), *others)

    return checkpoint(from_host, on_host(hidden_states), *others, use_reentrant=False, preserve_rng_state=False)


def on_host(states: Tensor) -> Tensor:
    """Copy the tensor to host memory; its gradient returns to the original device."""
    return states.to("cpu")
