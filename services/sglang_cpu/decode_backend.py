"""SGLang's ``torch_native`` attention, without a loop over requests in a decoding step.

The inherited backend decodes request by request in Python, for every layer and every token: a dozen small operations for one
row of one matrix product. Here one tensor gathers the cached keys and values of all requests, as long as the longest of
them, and a mask hides the rest of the shorter ones. The sums agree up to the last bits of float32; these can depend on the
longest request in the batch, as they can on the prefix cache.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from services.sglang_cpu.attention import decode_all


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """``torch_native`` with ordinary decoding steps in one call."""

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """The same as the inherited method, into ``output``; encoders and sliding windows are left to that one."""
        if encoder_lens is not None or is_cross_attn or (sliding_window_size is not None and sliding_window_size > -1):
            inherited: Any = super()._run_sdpa_forward_decode
            result: torch.Tensor = inherited(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return result
        decode_all(query, output, k_cache, v_cache, req_to_token[req_pool_indices], seq_lens, scaling)
        return output
