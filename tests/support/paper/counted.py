"""Counts the bytes that each kernel reads and writes, and the operations of matrix products, by place in the model.

Kernels are PyTorch's eager ones: each operator reads its arguments and writes its results once. Views move nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

aten = torch.ops.aten
PLACES: Final = (
    ("head", re.compile(r".*\b(lm_head|embed_out)\b.*")),
    ("embedding", re.compile(r".*\bembed_tokens\b.*")),
    ("router", re.compile(r".*\.mlp\.(gate|router)\b.*")),
    ("experts", re.compile(r".*\.mlp\b.*")),
    ("attention", re.compile(r".*\b(self_attn|linear_attn|rotary_emb)\b.*")),
    ("norms", re.compile(r".*norm\b.*")),
)
"""The first that one of the modules under way matches; norms within attention are its own."""
_PICKING: Final = {aten.gather.default, aten.index_select.default, aten.embedding.default, aten.index.Tensor}
"""Read as much of their first argument as they write."""
_PUTTING: Final = {aten.scatter_add_.default, aten.scatter_add.default, aten.index_add_.default, aten.index_put_.default}
"""Read and write as much of their first argument as the last one has."""
_ONLY_WRITING: Final = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full
}  # fmt: skip
_NO_KERNELS: Final = ("prim", "c10d", "_c10d_functional")
_FREE: Final = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.new_empty_strided.default,
}  # fmt: skip


@dataclass
class Amount:
    """What the kernels of one place did."""

    read: float = 0.0
    """Bytes."""
    written: float = 0.0
    operations: float = 0.0
    """Of floating point, two for a multiplication with its addition."""
    kernels: int = 0

    @property
    def moved(self) -> float:
        return self.read + self.written

    @classmethod
    def sum(cls, amounts: Iterable[Amount]) -> Amount:
        """Of several phases."""
        total = cls()
        for each in amounts:
            total.read += each.read
            total.written += each.written
            total.operations += each.operations
            total.kernels += each.kernels
        return total


def place_of(names: Iterable[str]) -> str:
    """Where modules or parameters of these names are, all under way at once."""
    known = list(names)
    return next((place for place, form in PLACES if any(form.fullmatch(each) for each in known)), "loss and sums")


class Counted(TorchDispatchMode):
    """Counts inside, by place and phase."""

    def __init__(self) -> None:
        super().__init__()
        self.amounts: dict[tuple[str, str], Amount] = defaultdict(Amount)
        self._tracker = ModuleTracker()
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside belongs to this part of a step."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __enter__(self) -> Any:
        self._tracker.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._phase and func.namespace not in _NO_KERNELS and func not in _FREE and not _is_view(func):
            amount = self.amounts[self._place(), self._phase]
            read, written = _moved(func, args, kwargs or {}, result)
            if read + written:
                amount.read += read
                amount.written += written
                amount.kernels += 1
            amount.operations += _operations(func, args, kwargs or {}, result)
        return result

    def _place(self) -> str:
        if self._phase == "optimizer":
            return "optimizer"
        return place_of(self._tracker.parents)


def _operations(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    if func._overloadpacket is aten._grouped_mm:
        # Each row of the one belongs to one matrix of the other, also where both are rows.
        return 2.0 * args[0].numel() * args[1].shape[-1]
    count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    # A formula of PyTorch's knows no dtype of the result.
    given = [value for value in args if not isinstance(value, torch.dtype)]
    return 0.0 if count is None else float(count(*given, **kwargs, out_val=result))


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(each.alias_info is not None and not each.alias_info.is_write for each in returned)


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[float, float]:
    # What a result is put into is not read.
    given = _tensors((args, {name: value for name, value in kwargs.items() if name != "out"}))
    if func in _PICKING:
        written = sum(map(_bytes, _tensors(result)))
        return written + sum(map(_bytes, given[1:])), written
    if func in _PUTTING:
        own = _bytes(given[-1])
        return own + sum(map(_bytes, given[1:])), own
    changed = [
        value for value, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]  # fmt: skip
    if func._overloadpacket in _ONLY_WRITING:
        given = []
    if func._overloadpacket in (aten.addmm, aten.addmm_) and kwargs.get("beta") == 0:
        given = given[1:]
    overwritten = func._overloadpacket in (aten.copy_, aten.zero_, aten.fill_)
    written = sum(map(_bytes, _tensors(changed or result)))
    read = sum(map(_bytes, given[len(_tensors(changed)) if overwritten else 0 :]))
    return read, written


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> float:
    """Of what has to be moved: what is expanded lies in memory once."""
    elements = 1.0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
