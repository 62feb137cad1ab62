"""Finds the file tensors that make one parameter, in the order of their elements in it.

transformers fuses what files keep apart: ``mlp.experts.gate_up_proj`` [E, 2I, H] is ``experts.0.gate_proj``,
``experts.0.up_proj``, ``experts.1.gate_proj``, ... end to end. So any range of a parameter's elements is found in the files
without the rest. The names come from transformers' own reverse conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gspo.model_files.file_names import file_tensors

_WIDTH: Final = 2


@dataclass(frozen=True)
class WantedTensor:
    """A tensor that files must hold."""

    name: str
    shape: tuple[int, ...]


def sources_of(model: Any, name: str, shape: Sequence[int]) -> list[WantedTensor] | None:
    """Return the tensors that, concatenated, make the parameter ``name`` of ``shape``.

    ``model``: any transformers model of this configuration, also one without memory.
    None when it is not a concatenation, for example when a conversion transposes.
    """
    whole = tuple(shape)
    stored = file_tensors(model, {name: torch.empty(whole, device="meta")})
    if len(stored) == 1:
        ((only, tensor),) = stored.items()
        return [WantedTensor(only, whole)] if tuple(tensor.shape) == whole else None
    if len(whole) < 2:
        return None
    # Every row by its number, twice: conversions drop dimensions of one. Those that mix elements inside rows show, too.
    rows = torch.Size(whole[:-1])
    probe = torch.arange(rows.numel()).view(*rows, 1).expand(*rows, _WIDTH)
    try:
        numbered = file_tensors(model, {name: probe})
    except (RuntimeError, ValueError, IndexError):
        return None
    found: list[WantedTensor] = []
    at = 0
    for own, numbers in sorted(numbered.items(), key=lambda pair: int(pair[1].reshape(-1)[0]) if pair[1].numel() else -1):
        expected = stored.get(own)
        if expected is None or tuple(expected.shape) != (*numbers.shape[:-1], whole[-1]) or numbers.shape[-1] != _WIDTH:
            return None
        num_rows = numbers.numel() // _WIDTH
        if not torch.equal(numbers.reshape(-1, _WIDTH), torch.arange(at, at + num_rows)[:, None].expand(-1, _WIDTH)):
            return None
        at += num_rows
        found.append(WantedTensor(own, tuple(expected.shape)))
    return found if at == rows.numel() else None
