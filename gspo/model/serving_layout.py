"""Where the tensors that engines load lie in a model's own parameters: found once, so that an export copies parameters.

A mixture of experts has a few hundred parameters and some 19,000 serving tensors. Almost all of them are ranges of a
parameter: expert e's ``up_proj`` is one block of rows of ``mlp.experts.gate_up_proj`` [E, 2I, H].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.model_files.file_names import file_tensors
from gspo.moe.expert_layout import slab_of


@dataclass(frozen=True)
class ServedPart:
    """One serving tensor: ``shape`` elements of a parameter from its element ``start`` on, in row-major order."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ServedParameter:
    """The serving tensors of one whole parameter, or of what was made from it."""

    values: Tensor
    """[n]: the elements in row-major order."""
    parts: Sequence[ServedPart]

    @classmethod
    def alone(cls, name: str, tensor: Tensor) -> ServedParameter:
        """Describe a parameter that is served unchanged under one name."""
        return cls(tensor.detach().reshape(-1), [ServedPart(name, tuple(tensor.shape), 0)])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every serving tensor, as a contiguous view."""
        for part in self.parts:
            yield part.name, self.values[part.start : part.start + part.num_elements].view(part.shape)


def serving_tensors(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the serving tensors of one whole parameter: itself under its checkpoint name, or its experts one by one."""
    slab = slab_of(name, tensor.shape)
    if slab is None:
        yield from file_tensors(model, {name: tensor}).items()
        return
    # transformers does not know this parameter: numbers in its place show where it has each row. Rows of one would be
    # squeezed.
    experts = tensor.shape[0]
    rows = torch.arange(experts * slab.of_rows).view(experts, slab.of_rows, 1).expand(-1, -1, 2)
    for serving_name, part in file_tensors(model, {slab.fused: rows}).items():
        expert, row = divmod(int(part.reshape(-1)[0]), slab.of_rows)
        if tuple(part.shape) != (slab.rows, 2):
            raise ValueError(f"{slab.fused} is served as {serving_name}, which is not one projection of one expert")
        if row == slab.first:
            yield serving_name, tensor[expert]


def stacks_experts(model: Any, fused: str) -> bool:
    """Tell whether files hold ``fused``, a parameter of all experts of a layer, as one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    # Rows of one would be squeezed.
    found = revert_weight_conversion(model, {fused: torch.empty(2, 4, 2)})
    return all(tensor.dim() == 3 for tensor in found.values())


class ServingLayout:
    """The serving tensors of a model's parameters, by the parameters' names; found at the first export of each."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # None: a serving tensor is not a range of the parameter, for example its transpose.
        self._parts: dict[str, list[ServedPart] | None] = {}
        self._parameter_of: dict[str, str] = {}

    def served(self, name: str, whole: Tensor) -> Iterator[ServedParameter]:
        """Yield what is served of the parameter ``name`` with the value ``whole``.

        Raises: ValueError when another parameter is served under the same name: the conversion then needs both at once.
        """
        if name not in self._parts:
            # The conversion is transformers' own and may change: what was found by row numbers is held against its result.
            own = [(serving_name, tensor.contiguous()) for serving_name, tensor in serving_tensors(self._model, name, whole)]
            self._claim(name, [serving_name for serving_name, _ in own])
            self._parts[name] = _verified(self._find(name, whole), whole, own)
            yield from (ServedParameter.alone(*each) for each in own)
            return
        parts = self._parts[name]
        if parts is not None:
            yield ServedParameter(whole.detach().reshape(-1), parts)
            return
        for serving_name, tensor in serving_tensors(self._model, name, whole):
            yield ServedParameter.alone(serving_name, tensor.contiguous())

    def places(self, name: str, shape: Sequence[int]) -> list[ServedPart] | None:
        """Return where the serving tensors of the parameter ``name`` with this shape are in it, without its values; None
        when one of them is not a range of it.

        Raises: ValueError when another parameter is served under the same name.
        """
        if name not in self._parts:
            found = self._find(name, torch.empty(tuple(shape), device="meta"))
            if found is not None:
                self._claim(name, [part.name for part in found])
            return found
        return self._parts[name]

    def _claim(self, name: str, serving_names: Sequence[str]) -> None:
        for serving_name in serving_names:
            other = self._parameter_of.setdefault(serving_name, name)
            if other != name:
                raise ValueError(
                    f"{other} and {name} are both served as {serving_name}; "
                    f"{type(self._model).__name__} needs a conversion of several parameters at once"
                )

    def _find(self, name: str, whole: Tensor) -> list[ServedPart] | None:
        """Convert numbers in the parameter's place. None where a result is not a range of it."""
        # Rows of two are enough to see where each row goes. Rows of one would be squeezed away.
        length = whole.shape[-1] if whole.dim() > 1 else 1
        shown = min(length, 2)
        shape = (*whole.shape[:-1], shown) if whole.dim() > 1 else tuple(whole.shape)
        found: list[ServedPart] = []
        for serving_name, part in serving_tensors(self._model, name, torch.arange(math.prod(shape)).view(shape)):
            numbers = part.reshape(-1)
            first = int(numbers[0]) if len(numbers) else 0
            if first % shown or not torch.equal(numbers, torch.arange(first, first + len(numbers))):
                return None
            if whole.dim() > 1 and (not part.dim() or part.shape[-1] != shown):
                return None
            part_shape = (*part.shape[:-1], length) if whole.dim() > 1 else tuple(part.shape)
            found.append(ServedPart(serving_name, part_shape, first // shown * length))
        return found if whole.dim() < 2 or self._keeps_columns(name, whole.shape) else None

    def _keeps_columns(self, name: str, shape: Sequence[int]) -> bool:
        """Convert numbers in the column's place, which take no memory: only the first two columns were seen."""
        columns = torch.arange(shape[-1])
        return all(
            not part.numel() or torch.equal(part[(0,) * (part.dim() - 1)], columns)
            for _, part in serving_tensors(self._model, name, columns.expand(*shape))
        )


def _verified(parts: list[ServedPart] | None, whole: Tensor, own: Sequence[tuple[str, Tensor]]) -> list[ServedPart] | None:
    """Return the parts, if they are what transformers makes of the parameter; otherwise None."""
    if parts is None:
        return None
    found = list(ServedParameter(whole.detach().reshape(-1), parts).tensors())
    if len(found) != len(own):
        return None
    for (name, tensor), (own_name, own_tensor) in zip(found, own, strict=True):
        if name != own_name or tensor.shape != own_tensor.shape or not torch.equal(tensor, own_tensor):
            return None
    return parts
