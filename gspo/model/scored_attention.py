"""Attention per segment with explicit scores, for soft caps and attention sinks, which no fused kernel computes.

    z_qk = scaling q k, then c tanh(z_qk / c) with a soft cap c;   w_qk = exp(z_qk) / (exp(sink) + sum over k of exp(z_qk))

Scores exist for one block of queries at a time: backward computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WINDOW_BLOCK: Final = 256
"""Queries of a block: at least so many, so that few kernels run."""


@dataclass(frozen=True)
class Scores:
    """How the scores of a layer are made."""

    scaling: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a segment, and the first key that any of them sees."""

    start: int
    end: int
    first_key: int

    @property
    def extent(self) -> tuple[int, int]:
        """Number of queries and of keys. Blocks of one extent see alike, because the last key is the last query."""
        return self.end - self.start, self.end - self.first_key

    def visible(self, window: int | None, device: torch.device) -> Tensor:
        """bool [queries, keys]: whether a query sees a key."""
        queries = torch.arange(self.start, self.end, device=device)[:, None]
        keys = torch.arange(self.first_key, self.end, device=device)
        before = keys <= queries
        return before if window is None else before & (keys > queries - window)


def pieces(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Yield the queries of one segment in blocks, each with the keys and values that any of them sees."""
    size = max(window or 0, WINDOW_BLOCK)
    keys, values = key.split(size, dim=2), value.split(size, dim=2)
    for index, own in enumerate(query.split(size, dim=2)):
        start = index * size
        end = start + own.shape[2]
        if window is None:
            yield Block(start, end, 0), own, key[:, :, :end], value[:, :, :end]
            continue
        # A window reaches back one block at most. Joined, not sliced: the backward of each slice would make a tensor as
        # large as the segment.
        seen = slice(max(0, index - 1), index + 1)
        yield Block(start, end, seen.start * size), own, torch.cat(keys[seen], dim=2), torch.cat(values[seen], dim=2)


def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, cu_seqlens: Sequence[int], scores: Scores
) -> Tensor:
    """Attend within each segment. query: [1, heads, T, D]; key and value: [1, key heads, T, D]. Returns [1, T, heads, D]."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    outputs = []
    for query_L, key_L, value_L in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True):
        for block, *inputs in pieces(query_L, key_L, value_L, scores.window):
            output = checkpoint(_block, *inputs, sinks_H, block, scores, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(output, Tensor)
            outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _block(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, block: Block, scores: Scores) -> Tensor:
    """[1, heads, queries, D]"""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    logits = (query @ key.transpose(2, 3)).float() * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~block.visible(scores.window, query.device), -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().reshape(1, -1, 1, 1).expand(-1, -1, logits.shape[2], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)
    if sinks_H is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
