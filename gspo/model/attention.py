"""Causal attention within each segment of a packed row, as an attention implementation of transformers.

A dense block mask over a packed row costs O(T^2) and gains nothing; attention per segment costs the sum of the
squared lengths (on a CPU at padding efficiency 0.26: 8,191 real tokens per second against 1,602). On
CUDA in half precision PyTorch's own variable-length flash attention does it in one kernel; elsewhere it is a
loop over scaled_dot_product_attention, bit-identical to single sequences. Soft-capped scores and attention sinks are in
``gspo.model.scored_attention``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from gspo.model.beginnings import MASKED_TOKENS, FamilyBoundaries, PromptFamily
from gspo.model.boundaries import Boundaries
from gspo.model.scored_attention import Scores, pieces, scored_attention
from gspo.model.sequence_parallel import RowShare

SEGMENT_ATTENTION = "gspo_segments"
"""Its name in transformers: ``attn_implementation=SEGMENT_ATTENTION``."""


Masks = dict[tuple[int, int], Tensor]
"""The mask of a block of queries, by its extent: [queries, keys], 0 or -inf."""


def register_segment_attention() -> str:
    """Register the implementation with transformers and return its name. A second call changes nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # No mask function is registered under this name, so transformers makes no mask: segments carry that structure. With
    # one, transformers would look for packed rows in the position ids, and the host would wait for the device each pass.
    ALL_ATTENTION_FUNCTIONS.register(SEGMENT_ATTENTION, segment_attention)
    return SEGMENT_ATTENTION


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_share: RowShare | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attend from each token to itself and to the tokens before it in its segment.

    Args:
        query: [1, heads, T, D]; key and value: [1, key heads, T, D].
        cu_seqlens: [S + 1] boundaries of the segments; they cover all T.
        sliding_window: each token sees only so many, itself included; None: all before it.
        softcap: scores are c tanh(score / c).
        s_aux: [heads] attention sinks: a score that takes part in the softmax, and adds nothing.
        row_share: the T tokens are this rank's slice of a row, which ``cu_seqlens`` covers. Collective then.

    Returns [1, T, heads, D] and no weights. Dropout is never applied: the learner must see the policy that sampled.
    Raises: ValueError for a mask, which this function does not read.
    """
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} asks for attention_mask, which attention per segment does not support")
    if row_share is not None:
        query, key, value = (row_share.to_heads(states) for states in (query, key, value))
        s_aux = None if s_aux is None else row_share.own_heads(s_aux)
    if isinstance(cu_seqlens, FamilyBoundaries):
        if s_aux is not None or softcap is not None or sliding_window is not None or row_share is not None:
            raise ValueError(f"{type(module).__name__} cannot share common beginnings; use learner.share_prompts = false")
        return _of_families(query, key, value, cu_seqlens, scaling), None
    if cu_seqlens[-1] != query.shape[2]:
        raise ValueError(f"cu_seqlens ends at {cu_seqlens[-1]}, the packed row has {query.shape[2]} tokens")
    if s_aux is None and softcap is None:
        output = _attended(query, key, value, cu_seqlens, scaling, sliding_window)
    else:
        shape = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
        output = scored_attention(query, key, value, s_aux, cu_seqlens, shape)
    return output if row_share is None else row_share.to_tokens(output), None


def _attended(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Sequence[int], scaling: float | None, window: int | None
) -> Tensor:
    """[1, T, heads, D]"""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, cu_seqlens, scaling, window)
    # Split, not sliced: the backward of each slice would make a tensor as large as the whole row, T x S in all.
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    grouped = query.shape[1] != key.shape[1]
    masks: Masks = {}
    segments = [
        scaled_dot_product_attention(query_L, key_L, value_L, is_causal=True, scale=scaling, enable_gqa=grouped)
        if window is None or query_L.shape[2] <= window
        else _in_window(query_L, key_L, value_L, scaling, window, masks)
        for query_L, key_L, value_L in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(segments, dim=2).transpose(1, 2).contiguous()


def _of_families(query: Tensor, key: Tensor, value: Tensor, boundaries: FamilyBoundaries, scaling: float | None) -> Tensor:
    """[1, U, heads, D]"""
    grouped = query.shape[1] != key.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        causal = mask is None
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )

    lengths = [family.num_tokens for family in boundaries.families]
    split = (states.split(lengths, dim=2) for states in (query, key, value))
    outputs = []
    for family, query_F, key_F, value_F in zip(boundaries.families, *split, strict=True):
        if not family.rests:
            outputs.append(attend(query_F, key_F, value_F))
        elif family.num_tokens <= MASKED_TOKENS:
            outputs.append(attend(query_F, key_F, value_F, boundaries.mask(family, query.device, query.dtype)))
        else:
            outputs += _of_long_family(family, (query_F, key_F, value_F), attend)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _of_long_family(family: PromptFamily, states: Sequence[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """[1, heads, F, D], in parts. Each sequence is attended whole: a mask of long sequences would be large, and the layers
    around attention cost more than attention to a beginning."""
    parts = [each.split([family.beginning, *family.rests], dim=2) for each in states]
    outputs: list[Tensor] = []
    for index in range(1, len(family.rests) + 1):
        whole = [torch.cat([each[0], each[index]], dim=2) for each in parts]
        beginning, rest = attend(*whole).split([family.beginning, family.rests[index - 1]], dim=2)
        outputs += [rest] if outputs else [beginning, rest]
    return outputs


def _in_window(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int, masks: Masks) -> Tensor:
    """One segment, whose tokens see the ``window`` last ones: blocks of queries, each with the keys that any of it sees.

    ``masks``: those of this layer so far. Autograd keeps the mask of each block, as numbers that are added to the scores:
    made anew for each, they would be several times the size of all queries.
    """
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for block, own, keys, values in pieces(query, key, value, window):
        if block.extent not in masks:
            seen = block.visible(window, query.device)
            masks[block.extent] = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        mask = masks[block.extent]
        outputs.append(scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs, dim=2)


@cache
def _asks_for_grouped_heads() -> bool:
    """Return whether variable-length attention needs a flag for fewer key heads: since PyTorch 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Sequence[int], scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    found = Boundaries.of(cu_seqlens)
    boundaries, longest = found.on(query.device), found.longest
    # The kernel wants values as wide as keys; in latent attention they are narrower.
    width = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - width))
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _asks_for_grouped_heads() else {}
    output = varlen_attn(
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)[..., :width]
