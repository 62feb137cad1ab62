"""Adapters (LoRA) in SGLang on a CPU: nothing is pinned, and /weights_checker also says what the slots of adapters hold.

SGLang's own answer leaves adapters out, so that nobody could tell which bytes a request's adapter has. Here the matrices of
each adapter that lies in a slot are named (``gspo_services.shared.weights.slot_name``) and hashed as they lie there:
they are what the next batch is multiplied with. An adapter gets a slot with its first request.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from gspo_services.shared.weights import REPORTS_SLOTS, slot_name

_MANAGER: Final = "_gspo_lora_manager"


class _Unpinned:
    """torch, but nothing that it makes is pinned: a build without an accelerator has no allocator for that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*values, **options)

    def zeros(self, *sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*sizes, **options)


def pin_nothing(*modules: Any) -> None:
    """Let these modules of SGLang make ordinary tensors where they ask for pinned ones."""
    for module in modules:
        module.torch = _Unpinned()
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment]


def _as_it_is(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor


def report_slots(lora_manager: Any, weight_checker: Any) -> None:
    """Let ``WeightChecker`` of SGLang's module report the adapters of the model's ``LoRAManager``, too."""
    initialise: Callable[..., None] = lora_manager.LoRAManager.__init__
    of_model: Callable[[Any], Iterator[tuple[str, torch.Tensor]]] = weight_checker.WeightChecker._model_state

    def __init__(self: Any, base_model: torch.nn.Module, *others: Any, **more: Any) -> None:
        # Not by setattr: the manager refers to the model in turn, and must not become a part of it.
        base_model.__dict__[_MANAGER] = self
        initialise(self, base_model, *others, **more)

    def _model_state(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from of_model(self)
        manager = self._get_model().__dict__.get(_MANAGER)
        if manager is not None:
            yield from slots(manager)

    lora_manager.LoRAManager.__init__ = __init__
    weight_checker.WeightChecker._model_state = _model_state


def announce_slots(server_args: Any) -> None:
    """Let /server_info say that this server reports what lies in its slots."""
    named = list(server_args.custom_weight_loader or [])
    if REPORTS_SLOTS not in named:
        server_args.custom_weight_loader = [*named, REPORTS_SLOTS]


def slots(manager: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of each adapter that lies in a slot, as they lie there, without the rows that its rank leaves free."""
    pool = manager.memory_pool
    for uid, slot in pool.uid_to_buffer_id.items():
        ref = manager.lora_refs.get(uid)
        if ref is None:
            continue
        rank = manager.loras[uid].config.r
        for module in pool.A_buffer:
            for layer, (a, b) in enumerate(zip(pool.A_buffer[module], pool.B_buffer[module], strict=True)):
                # A of merged projections is one above the other.
                rows = rank * (a.shape[1] // pool.max_lora_rank)
                yield slot_name(ref.lora_name, layer, module, "A"), a[slot, :rows]
                yield slot_name(ref.lora_name, layer, module, "B"), b[slot, :, :rank]
