"""Sequences of a group begin alike: their packed row has the common beginning once, and so has the model's pass.

    row of one group: [b b b b | x x x | y y | z z z z]      x sees b and x; y sees b and y; z sees b and z

A token's hidden states depend on it and the tokens before it alone, so they are the same as in a row of whole sequences; the
gradients of all that follow add up at the beginning. With prompts of 36 tokens and 8 answers of 5, a group has 76 tokens
instead of 328. (Prefix Grouper, arXiv 2506.05433, does so in attention alone.)

Letters in shapes: T tokens of whole sequences end to end, U tokens of the row with common beginnings once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.boundaries import Boundaries

LEAST_SAVED: Final = 1 / 8
"""Of a family's tokens; below, they stay whole."""
MASKED_TOKENS: Final = 512
"""A family of at most so many tokens is one call of attention with a mask; of a larger one, each sequence is a call."""


class PromptFamily(NamedTuple):
    """A segment of the row: sequences with a common beginning, or a single sequence."""

    beginning: int
    """Tokens that all have."""
    rests: tuple[int, ...] = ()
    """Tokens of each different rest; none for a single sequence."""

    @property
    def num_tokens(self) -> int:
        return self.beginning + sum(self.rests)


class FamilyBoundaries(Boundaries):
    """The ends of the families, with the masks of their attention: each is made once for all layers of a pass."""

    def __init__(self, families: Sequence[PromptFamily]) -> None:
        super().__init__((0, *np.cumsum([family.num_tokens for family in families]).tolist()))
        self.families = tuple(families)
        self._masks: dict[tuple[PromptFamily, torch.device, torch.dtype], Tensor] = {}

    def mask(self, family: PromptFamily, device: torch.device, dtype: torch.dtype) -> Tensor:
        """[F, F]: 0 where a token of the family sees another, else -inf."""
        key = (family, device, dtype)
        if key not in self._masks:
            parts = torch.tensor([family.beginning, *family.rests], device=device)
            owners = torch.arange(len(parts), device=device).repeat_interleave(parts)
            seen = (owners[:, None] == owners) | (owners == 0)
            mask = torch.zeros(seen.shape, device=device, dtype=dtype)
            self._masks[key] = mask.masked_fill_(~seen.tril(), -torch.inf)
        return self._masks[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedRow:
    """A packed row that has common beginnings once."""

    input_ids: Tensor
    """int64 [1, U]"""
    position_ids: Tensor
    """int64 [1, U]; as in the whole sequences."""
    families: tuple[PromptFamily, ...]
    places_T: Tensor
    """int64; where the row has each token of the whole sequences."""
    firsts_U: Tensor
    """int64; the first token of the whole sequences that each is."""

    def to(self, device: torch.device) -> SharedRow:
        """Return the same row with its tensors on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def shared_row(token_ids: Sequence[NDArray[np.int64]], families: Sequence[int]) -> SharedRow | None:
    """Return the row of these sequences, in their order; None where none begins as its neighbours do.

    ``families``: neighbouring sequences of one number share what they have in common.
    """
    rows: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    found: list[PromptFamily] = []
    end = 0
    for _, members in groupby(range(len(token_ids)), key=families.__getitem__):
        own = [token_ids[index] for index in members]
        for shared in _split(own):
            beginning = len(shared[0]) if len(shared) == 1 else _common(shared)
            starts: dict[bytes, int] = {}
            rests: list[int] = []
            rows.append(shared[0][:beginning])
            positions.append(np.arange(beginning))
            first, end = end, end + beginning
            for ids in shared:
                rest = ids[beginning:]
                if len(rest) and (key := rest.tobytes()) not in starts:
                    starts[key] = end
                    rests.append(len(rest))
                    rows.append(rest)
                    positions.append(np.arange(beginning, len(ids)))
                    end += len(rest)
                start = starts.get(rest.tobytes(), end)
                places += [np.arange(first, first + beginning), np.arange(start, start + len(rest))]
            found.append(PromptFamily(beginning, tuple(rests)))
    places_T = np.concatenate(places)
    if end == len(places_T):
        return None
    firsts_U = np.zeros(end, dtype=np.int64)
    firsts_U[places_T[::-1]] = np.arange(len(places_T))[::-1]
    return SharedRow(
        input_ids=torch.from_numpy(np.concatenate(rows))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        families=tuple(found),
        places_T=torch.from_numpy(places_T),
        firsts_U=torch.from_numpy(firsts_U),
    )


def _split(sequences: list[NDArray[np.int64]]) -> list[list[NDArray[np.int64]]]:
    """All in one family, or each for itself where they have too little in common."""
    saved = _common(sequences) * (len(sequences) - 1)
    if saved < LEAST_SAVED * sum(len(ids) for ids in sequences):
        return [[ids] for ids in sequences]
    return [sequences]


def _common(sequences: Sequence[NDArray[np.int64]]) -> int:
    """Return how many tokens all sequences begin with."""
    length = min(len(ids) for ids in sequences)
    first = sequences[0][:length]
    for ids in sequences[1:]:
        differ = np.flatnonzero(first[:length] != ids[:length])
        if len(differ):
            length = int(differ[0])
    return length


def can_share(config: Mapping[str, Any]) -> bool:
    """Return whether a model can compute such a row: with causal attention alone, and scores of one fused kernel."""
    layers = config.get("layer_types")
    whole = set(layers) == {"full_attention"} if layers else not config.get("sliding_window")
    return whole and not config.get("attn_logit_softcapping")
