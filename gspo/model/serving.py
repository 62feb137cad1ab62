"""Weights in the layout that inference engines load: the names and shapes of a Hugging Face checkpoint.

In memory, transformers fuses what a checkpoint keeps apart (``mlp.experts.gate_up_proj`` [E, 2I, H] is
``mlp.experts.{e}.gate_proj.weight`` and ``up_proj.weight`` on disk). An engine answers "success" to a name that it
does not know, so the names must come from the one place that defines them: transformers' own reverse conversion,
applied to one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gspo.moe.expert_layout import checkpoint_tensors

Gathered = Callable[[Tensor], AbstractContextManager[Tensor | None]]
"""Opens a context that holds the whole value of a parameter or buffer. It is collective where parameters are partitioned;
ranks that emit nothing may get None."""


def serving_tensors(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the serving tensors of one whole parameter: itself under its checkpoint name, or its experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    own = checkpoint_tensors(name, tensor)
    if own is not None:
        # transformers does not know these names.
        yield from own
        return
    yield from revert_weight_conversion(model, {name: tensor}).items()


def serving_weights(
    model: Any, *, gathered: Gathered, emit: bool = True, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights under their serving names, one parameter at a time, as ``save_pretrained`` would write them.

    Tied embeddings appear once, under the name of the input embedding. Persistent buffers are included.

    Args:
        model: a Hugging Face model, partitioned or not.
        gathered: see ``Gathered``; ``contextlib.nullcontext`` for a model that is not partitioned.
        emit: False on ranks that only take part in collectives: they get nothing and must still exhaust the iterator.
        dtype: floating-point tensors are cast to it; None keeps their dtype.

    The tensors are contiguous, and valid only until the next one is requested: copy what you keep.
    Raises: ValueError when two parameters share a serving name: the conversion then needs both at once.
    """
    seen: dict[str, str] = {}
    visited: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in visited:
            continue
        visited.add(id(value))
        with gathered(value) as found:
            if not emit:
                continue
            assert found is not None, f"{name} was not gathered on a rank that emits"
            whole = found.detach()
            if dtype is not None and whole.is_floating_point():
                whole = whole.to(dtype)
            for serving_name, tensor in serving_tensors(model, name, whole):
                if serving_name in seen:
                    raise ValueError(
                        f"{seen[serving_name]} and {name} are both served as {serving_name}; "
                        f"{type(model).__name__} needs a conversion of several parameters at once"
                    )
                seen[serving_name] = name
                yield serving_name, tensor.contiguous()


def is_partitioned(value: Tensor) -> bool:
    """Tell whether ZeRO-3 has partitioned this parameter (never a buffer)."""
    return isinstance(value, nn.Parameter) and "ds_id" in vars(value)
