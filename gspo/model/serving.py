"""Weights in the layout that inference engines load: the names and shapes of a Hugging Face checkpoint.

In memory, transformers fuses what a checkpoint keeps apart (``mlp.experts.gate_up_proj`` [E, 2I, H] is
``mlp.experts.{e}.gate_proj.weight`` and ``up_proj.weight`` on disk). An engine answers "success" to a name that it
does not know, so the names must come from the one place that defines them: transformers' own reverse conversion,
applied to one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn

from gspo.model.lora import AdaptedWeight, adapted_weights, is_lora, lora_name, merged, plain_name
from gspo.model.serving_layout import ServedParameter, ServingLayout, stacks_experts
from gspo.moe.expert_layout import whole_of
from gspo.moe.mixture import FLOAT32_ROUTERS

Gathered = Callable[[Tensor], AbstractContextManager[Tensor | None]]
"""Opens a context that holds the whole value of a parameter or buffer. It is collective where parameters are partitioned;
ranks that emit nothing may get None."""
_FLOAT32: Final = (".A_log", ".experts.gate_up_proj_bias", ".experts.down_proj_bias")
"""Endings of parameters that SGLang has in float32 whatever the model is in."""


def serving_weights(
    model: Any,
    *,
    gathered: Gathered,
    emit: bool = True,
    dtype: torch.dtype | None = None,
    with_adapters: bool = True,
    layout: ServingLayout | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights under their serving names, as ``save_pretrained`` would write them. See ``served_parameters``."""
    for parameter in served_parameters(
        model, gathered=gathered, emit=emit, dtype=dtype, with_adapters=with_adapters, layout=layout
    ):
        yield from parameter.tensors()


def served_parameters(
    model: Any,
    *,
    gathered: Gathered,
    emit: bool = True,
    dtype: torch.dtype | None = None,
    with_adapters: bool = True,
    layout: ServingLayout | None = None,
) -> Iterator[ServedParameter]:
    """Yield all weights as they are served, one parameter at a time.

    Tied embeddings appear once, under the name of the input embedding. Persistent buffers are included. Weights with an
    adapter (``gspo.model.lora``) are served with it, under the names that they have without.

    Args:
        model: a Hugging Face model, partitioned or not.
        gathered: see ``Gathered``; ``contextlib.nullcontext`` for a model that is not partitioned.
        emit: False on ranks that only take part in collectives: they get nothing and must still exhaust the iterator.
        dtype: floating-point parameters are cast to it (see ``ServedTypes``); None keeps their dtype.
        with_adapters: False yields the weights as they are without adapters.
        layout: this model's; one that is kept makes every export after the first faster.

    The tensors are contiguous, and valid only until the next parameter is requested: copy what you keep.
    Raises: ValueError when two parameters share a serving name: the conversion then needs both at once.
    """
    layout, types = layout or ServingLayout(model), ServedTypes(model, dtype)
    adapters = adapted_weights(model) if with_adapters else {}
    for name, parts in served_values(model):
        yield from served_parameter(
            name, parts, layout, adapters.get(name), gathered=gathered, emit=emit, dtype=types.of(name, parts[0])
        )


def served_values(model: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield each parameter and persistent buffer under the name that it has without adapters; tied ones once, the adapters'
    own matrices not.

    Each is one tensor. Only where files stack experts, and ranks share them, gate and up are two, [E / n, I, H] each: side
    by side in the second dimension they are what transformers has under that name.
    """
    state = model.state_dict(keep_vars=True)
    visited: set[int] = set()
    stacked: bool | None = None
    for own_name, value in state.items():
        if id(value) in visited or is_lora(own_name):
            continue
        name, parts = plain_name(own_name), [value]
        whole = whole_of(name)
        if whole is not None:
            stacked = stacks_experts(model, whole[0]) if stacked is None else stacked
            if stacked:
                name, parts = whole[0], [state[each] for each in whole[1]]
        visited |= {id(part) for part in parts}
        yield name, parts


class ServedTypes:
    """The dtype in which each parameter and buffer of a model is served, as engines have it."""

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        """``dtype``: of floating-point parameters; None: their own."""
        self._dtype = dtype
        self._float32_routers = getattr(getattr(model, "config", None), "model_type", "") in FLOAT32_ROUTERS

    def of(self, name: str, value: Tensor) -> torch.dtype:
        """Return that of the parameter or buffer ``name``: of a buffer its own, such as a bias of routers."""
        if not isinstance(value, nn.Parameter) or not value.is_floating_point():
            return value.dtype
        if name.endswith(_FLOAT32) or (self._float32_routers and name.endswith(".gate.weight")):
            return torch.float32
        return value.dtype if self._dtype is None else self._dtype


def served_parameter(
    name: str,
    parts: Sequence[Tensor],
    layout: ServingLayout,
    adapted: AdaptedWeight | None = None,
    *,
    gathered: Gathered,
    emit: bool,
    dtype: torch.dtype,
) -> Iterator[ServedParameter]:
    """Yield what is served of one parameter, with its adapter, in ``dtype``. ``parts``: see ``served_values``."""
    with ExitStack() as held:
        found = [held.enter_context(gathered(part)) for part in parts]
        change = _gathered_adapter(adapted, gathered, held)
        if not emit:
            return
        own = [part.detach() for part in found if part is not None]
        assert len(own) == len(parts), f"{name} was not gathered on a rank that emits"
        whole = own[0] if len(own) == 1 else torch.cat(own, dim=1)
        if change is not None:
            whole = merged(whole, *change)
        yield from layout.served(name, whole.to(dtype))


def lora_weights(model: Any, *, gathered: Gathered, emit: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a model's adapters, under the names of peft's files without their prefix. See
    ``serving_weights``."""
    for name, value in model.named_parameters():
        if is_lora(name):
            with gathered(value) as found:
                if emit:
                    assert found is not None, f"{name} was not gathered on a rank that emits"
                    yield lora_name(name), found.detach().contiguous()


def _gathered_adapter(
    adapted: AdaptedWeight | None, gathered: Gathered, held: ExitStack
) -> tuple[AdaptedWeight, Tensor, Tensor] | None:
    """The whole matrices of an adapter until ``held`` ends; None where there is none, or on ranks that emit nothing."""
    if adapted is None:
        return None
    lora_a, lora_b = (held.enter_context(gathered(matrix)) for matrix in (adapted.lora_a, adapted.lora_b))
    return None if lora_a is None or lora_b is None else (adapted, lora_a.detach(), lora_b.detach())


def is_partitioned(value: Tensor) -> bool:
    """Tell whether ZeRO-3 has partitioned this parameter (never a buffer)."""
    return isinstance(value, nn.Parameter) and "ds_id" in vars(value)
