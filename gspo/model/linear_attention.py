"""Layers of gated linear attention (Qwen3-Next, Qwen3.5) on packed sequences: one row a sequence, padded on the right.

Such a layer carries a state and a convolution from token to token, and would carry them from one sequence into the next.
Both only look back, so padding on the right changes nothing. The layer is called once for all rows: under ZeRO-3 each call
is a collective, and ranks have different numbers of sequences. The rest of the model stays packed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gspo.model.boundaries import Boundaries

MODULE_NAME = "linear_attn"
"""The name of such a module in a decoder layer of transformers."""


def by_rows(model: nn.Module) -> int:
    """Make the model's linear attention see each segment as a separate row. Returns the number of such layers."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == MODULE_NAME]
    for module in found:
        module.forward = types.MethodType(_by_rows(type(module).forward), module)
    return len(found)


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
