"""Names and shapes of experts in the three layouts of a mixture of experts.

    checkpoint, engine   mlp.experts.{e}.gate_proj.weight [I, H], up_proj [I, H], down_proj [H, I]     mlp.gate.weight [E, H]
                         (or as the family has it: transformers knows)
    transformers         mlp.experts.gate_up_proj [E, 2I, H], down_proj [E, H, I]                      mlp.gate.weight
    DeepSpeed's AutoEP   mlp.experts.w1, w3 [E/n, I, H], w2 [E/n, H, I] (gate, up, down) on each rank  mlp.gate.weight

(AutoEP has names of its own for routers and shared experts, too; the learner gives them back those of transformers.)
A *piece* is what the last two have in common: ``mlp.experts.gate_proj``, ``up_proj`` and ``down_proj`` [E, ...]. A learner's
state is saved by pieces, so that it can be loaded into another layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from torch import Tensor

_SLAB: Final = re.compile(r"(.+\.experts)\.(w1|w2|w3)")
_FUSED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_PROJECTIONS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_HALVES: Final = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Piece:
    """A part of one parameter: rows ``start`` to ``end`` of its second dimension, or all of it."""

    name: str
    start: int | None = None
    end: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of the whole parameter, as a view."""
        return tensor if self.start is None else tensor[:, self.start : self.end]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this part of a parameter of shape ``whole``."""
        if self.start is None or self.end is None:
            return tuple(whole)
        return (whole[0], self.end - self.start, *whole[2:])


def pieces(name: str, shape: Sequence[int]) -> list[Piece]:
    """Return the pieces of the parameter ``name`` of ``shape``, in the order of its second dimension."""
    slab, fused = _SLAB.fullmatch(name), _FUSED.fullmatch(name)
    if slab is not None:
        return [Piece(f"{slab[1]}.{_PROJECTIONS[slab[2]]}")]
    if fused is not None and fused[2] == "gate_up_proj":
        bounds = (0, shape[1] // 2, shape[1])
        return [Piece(f"{fused[1]}.{half}", *rows) for half, rows in zip(_HALVES, pairwise(bounds), strict=True)]
    return [Piece(name)]


@dataclass(frozen=True)
class Neighbours:
    """Elements side by side in a flattened part of a parameter, and in a flattened piece."""

    begin: int
    """The first of them in the part; ``end`` is the place after the last."""
    end: int
    piece: str
    first: int
    """The place of the first of them in the piece, whose rows are those of all experts."""


def stretches(name: str, shape: Sequence[int], start: int, length: int, *, first_row: int = 0) -> Iterator[Neighbours]:
    """Yield a flattened part of the parameter ``name`` of ``shape`` in stretches, in order: they cover it.

    Args:
        shape: of the rows that one rank holds.
        start: of the part in these rows, flattened; it has ``length`` elements.
        first_row: the place of these rows among those of all ranks.
    """
    found = pieces(name, shape)
    if len(found) == 1:
        yield Neighbours(0, length, found[0].name, first_row * prod(shape[1:]) + start)
        return
    row, column = prod(shape[1:]), prod(shape[2:])
    for place in range(start // row, -(-(start + length) // row)):
        for piece in found:
            assert piece.start is not None
            assert piece.end is not None
            low, high = piece.start * column, piece.end * column
            begin, end = max(start, place * row + low), min(start + length, place * row + high)
            if begin < end:
                first = (first_row + place) * (high - low) + begin - place * row - low
                yield Neighbours(begin - start, end - start, piece.name, first)


def whole_of(name: str) -> tuple[str, list[str]] | None:
    """Return the parameter of transformers that AutoEP's ``name`` is a part of, and the names of all its parts, which lie
    side by side in its second dimension; None for any other parameter."""
    slab = _SLAB.fullmatch(name)
    if slab is None:
        return None
    experts = slab[1]
    return (
        (f"{experts}.down_proj", [name])
        if slab[2] == "w2"
        else (f"{experts}.gate_up_proj", [f"{experts}.w1", f"{experts}.w3"])
    )


@dataclass(frozen=True)
class Slab:
    """What AutoEP's parameter of a layer's experts is in transformers: ``rows`` rows of ``fused``, from ``first`` on, of
    ``of_rows`` that an expert has there."""

    fused: str
    first: int
    rows: int
    of_rows: int


def slab_of(name: str, shape: Sequence[int]) -> Slab | None:
    """Return it for AutoEP's parameter ``name`` [E, rows, ...]; None for any other parameter."""
    slab = _SLAB.fullmatch(name)
    if slab is None:
        return None
    if slab[2] == "w2":
        return Slab(f"{slab[1]}.down_proj", 0, shape[1], shape[1])
    return Slab(f"{slab[1]}.gate_up_proj", shape[1] * (slab[2] == "w3"), shape[1], 2 * shape[1])
