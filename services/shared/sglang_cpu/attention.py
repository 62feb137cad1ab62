"""Computes attention of all requests of one step in one call of PyTorch's attention: a new token each, or prompts."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def decode_all(
    query_BHD: torch.Tensor,
    output_BHE: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKE: torch.Tensor,
    slots_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    scaling: float | None,
) -> None:
    """Compute attention of each request's new token over all of its tokens so far, into ``output_BHE``.

    The cache has S slots of K heads each; the H query heads form K groups of adjacent heads. ``slots_BL`` gives the slot of
    each token of a request; the first ``lengths_B`` (at least 1) count.
    """
    longest = int(lengths_B.max())
    counts_BL = torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
    num_rows, num_heads, width = query_BHD.shape
    num_groups = keys_SKD.shape[1]

    result = scaled_dot_product_attention(
        # The heads of a group share keys, so they become queries of one head.
        query_BHD.view(num_rows, num_groups, num_heads // num_groups, width),
        _cached(keys_SKD, slots_BL, counts_BL).to(query_BHD.dtype),
        _cached(values_SKE, slots_BL, counts_BL).to(query_BHD.dtype),
        attn_mask=counts_BL[:, None, None, :],
        scale=scaling,
    )
    output_BHE.copy_(result.reshape(output_BHE.shape))


def extend_all(
    query_THD: torch.Tensor,
    output_THE: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKE: torch.Tensor,
    slots_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    new_B: torch.Tensor,
    scaling: float | None,
    *,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compute causal attention of the last ``new_B`` (at least 1) tokens of each request, end to end in ``query_THD``, over
    all of its ``lengths_B`` tokens so far, into ``output_THE``. The cache is that of ``decode_all``.

    ``window``: a token sees itself and so many before. ``sinks_H``: the score of each head's sink, which takes a part of the
    attention and has no value.
    """
    longest, most_new = int(lengths_B.max()), int(new_B.max())
    num_rows, num_heads, width = len(new_B), *query_THD.shape[1:]
    num_groups = keys_SKD.shape[1]
    in_group = num_heads // num_groups
    counts_BL = torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
    is_new_BN = torch.arange(most_new, device=new_B.device) < new_B[:, None]
    query_BNHD = query_THD.new_zeros(num_rows, most_new, num_heads, width)
    query_BNHD[is_new_BN] = query_THD
    # A token sees those up to itself. Rows without a token see the first one: an empty sum would not be a number.
    last_seen_BN = torch.where(is_new_BN, (lengths_B - new_B)[:, None] + torch.arange(most_new, device=new_B.device), 0)
    sees_BNL = torch.arange(longest, device=lengths_B.device) <= last_seen_BN[:, :, None]
    if window is not None:
        sees_BNL &= torch.arange(longest, device=lengths_B.device) >= last_seen_BN[:, :, None] - window
    mask = sees_BNL[:, None].repeat(1, 1, in_group, 1)
    keys_BKLD, values_BKLE = (_cached(each, slots_BL, counts_BL).to(query_THD.dtype) for each in (keys_SKD, values_SKE))
    if sinks_H is not None:
        # One more key, of zeros, with the sink as its score; and a value of zeros.
        keys_BKLD, values_BKLE = (pad(each, (0, 0, 0, 1)) for each in (keys_BKLD, values_BKLE))
        sinks_KN1 = sinks_H.to(query_THD.dtype).view(num_groups, in_group).repeat_interleave(most_new, 1)[..., None]
        scores = torch.zeros_like(mask, dtype=query_THD.dtype).masked_fill(~mask, -math.inf)
        mask = torch.cat([scores.expand(-1, num_groups, -1, -1), sinks_KN1.expand(num_rows, -1, -1, -1)], dim=-1)

    grouped = query_BNHD.view(num_rows, most_new, num_groups, in_group, width).permute(0, 2, 3, 1, 4)
    result = scaled_dot_product_attention(
        grouped.reshape(num_rows, num_groups, in_group * most_new, width),
        keys_BKLD,
        values_BKLE,
        attn_mask=mask,
        scale=scaling,
    )
    result = result.view(num_rows, num_groups, in_group, most_new, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
    output_THE.copy_(result[is_new_BN])


def _cached(cache_SKD: torch.Tensor, slots_BL: torch.Tensor, counts_BL: torch.Tensor) -> torch.Tensor:
    """Return the cached values of each request's tokens [B, K, L, D], as long as ``counts_BL``, which marks valid ones."""
    num_rows, longest = counts_BL.shape
    # Beyond its end a row repeats its own first slot: never another request's, and never one without a number.
    own_BL = torch.where(counts_BL, slots_BL[:, :longest], slots_BL[:, :1])
    # index_select copies whole rows; an index of the same cache took five times as long.
    rows_RW = cache_SKD.flatten(1).index_select(0, own_BL.flatten())
    return rows_RW.view(num_rows, longest, cache_SKD.shape[1], -1).transpose(1, 2)
