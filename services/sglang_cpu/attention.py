"""One decoding step of all requests in one call of PyTorch's attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_all(
    query_BHD: torch.Tensor,
    output_BHE: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKE: torch.Tensor,
    slots_BL: torch.Tensor,
    lengths_B: torch.Tensor,
    scaling: float | None,
) -> None:
    """Attention of each request's new token over all of its tokens so far, into ``output_BHE``.

    The cache has S slots of K heads each; the H query heads form K groups of adjacent heads. ``slots_BL`` gives the slot of
    each token of a request; the first ``lengths_B`` (at least 1) count.
    """
    longest = int(lengths_B.max())
    counts_BL = torch.arange(longest, device=lengths_B.device) < lengths_B[:, None]
    # Beyond its end a row repeats its own first slot: never another request's, and never one without a number.
    slots_BL = torch.where(counts_BL, slots_BL[:, :longest], slots_BL[:, :1])
    num_rows, num_heads, width = query_BHD.shape
    num_groups = keys_SKD.shape[1]

    def cached(cache_SKD: torch.Tensor) -> torch.Tensor:
        # index_select copies whole rows; an index of the same cache took five times as long.
        rows_RW = cache_SKD.flatten(1).index_select(0, slots_BL.flatten())
        return rows_RW.view(num_rows, longest, num_groups, -1).transpose(1, 2).to(query_BHD.dtype)

    result = scaled_dot_product_attention(
        # The heads of a group share keys, so they become queries of one head.
        query_BHD.view(num_rows, num_groups, num_heads // num_groups, width),
        cached(keys_SKD),
        cached(values_SKE),
        attn_mask=counts_BL[:, None, None, :],
        scale=scaling,
    )
    output_BHE.copy_(result.reshape(output_BHE.shape))
