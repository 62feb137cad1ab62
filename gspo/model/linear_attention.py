"""Layers of gated linear attention (Qwen3-Next, Qwen3.5) on packed sequences: one row a sequence, padded on the right.

Such a layer carries a state and a convolution from token to token, and would carry them from one sequence into the next.
Both only look back, so padding on the right changes nothing. The layer is called once for all rows: under ZeRO-3 each call
is a collective, and ranks have different numbers of sequences. The rest of the model stays packed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from gspo.model.boundaries import Boundaries

LINEAR_ATTENTION: Final = "linear_attention"
"""The type of such layers in a configuration."""
MODULE_NAME: Final = "linear_attn"
"""The name of such a module in a decoder layer of transformers."""


def by_rows(model: nn.Module) -> int:
    """Make the model's linear attention see each segment as a separate row. Returns the number of such layers.

    Raises: ValueError for a model with other layers that carry a state: sequences would not be apart.
    """
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == MODULE_NAME}
    _require_apart(model, found)
    for module in found.values():
        module.forward = types.MethodType(_by_rows(type(module).forward), module)
    return len(found)


def _require_apart(model: Any, found: Mapping[str, nn.Module]) -> None:
    """Raises: ValueError when the model has a layer with a state that is not ``found``."""
    for name, module in model.named_modules():
        inside = any(name == each or name.startswith(f"{each}.") for each in found)
        if not inside and _carries_state(module):
            raise ValueError(
                f"{name} ({type(module).__name__}) carries a state from token to token, and would carry it from one "
                "sequence into the next; use another model"
            )
    config = getattr(model, "config", None)
    said = list(getattr(config, "layer_types", None) or ()).count(LINEAR_ATTENTION)
    if said > len(found):
        raise ValueError(
            f"{type(model).__name__} has {said} layers of {LINEAR_ATTENTION}, and {len(found)} are known as such: the "
            "others would carry their state from one sequence into the next; use another model"
        )


def _carries_state(module: nn.Module) -> bool:
    """Convolutions and the decay of a state are how transformers' layers of this kind are made."""
    return any(isinstance(child, nn.Conv1d) for child in module.children()) or any(
        name.endswith("A_log") for name, _ in module.named_parameters(recurse=False)
    )


def _by_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    def on_rows(self: nn.Module, hidden_states: Tensor, *, cu_seqlens: Sequence[int], **arguments: Any) -> Tensor:
        if arguments.pop("row_share", None) is not None:
            raise ValueError(f"{type(self).__name__} carries a state from token to token; use learner.sequence_parallel = 1")
        found = Boundaries.of(cu_seqlens).rows(hidden_states.device)
        rows = hidden_states[0, found.places_SL] * found.is_token_SL[..., None].to(hidden_states.dtype)
        output: Tensor = forward(self, rows, **arguments)
        # By places, which are known; picked by truth values, the host would wait to learn how many there are.
        return output.flatten(0, 1)[found.slots_T][None]

    return on_rows
