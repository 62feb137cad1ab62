"""SGLang's ``torch_native`` attention, without a loop over requests in a decoding step, or over many short prompts.

The inherited backend goes request by request in Python, for every layer: a dozen small operations for one row of one matrix
product. Here one tensor gathers the cached keys and values of all requests, as long as the longest of
them, and a mask hides the rest of the shorter ones. The sums agree up to the last bits of float32; these can depend on the
longest request in the batch, as they can on the prefix cache.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from sglang.srt.layers.attention.torch_native_backend import KVWriteLoc, TorchNativeAttnBackend

from gspo_services.shared.sglang_cpu.attention import decode_all, extend_all

PADDED_MOST: Final = 4
"""Prompts are taken in one call where padding makes at most this many times the work of the loop, which computes the
whole square of each length..."""
PADDED_TOKENS: Final = 65_536
"""...and at most this many cached tokens are gathered: a layer's copy of them stays small."""


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """``torch_native`` with ordinary decoding steps, and prompts of about one length, in one call; and with sinks."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> torch.Tensor:
        """Do the same as the inherited method. ``sinks``: the scores of the layer's sinks, one for each head."""
        if sinks is None:
            inherited: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return inherited
        return self._with_sinks(q, k, v, layer, forward_batch, forward_batch.extend_seq_lens, save_kv_cache, sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> torch.Tensor:
        """Do the same as the inherited method. ``sinks``: as for ``forward_extend``."""
        if sinks is None:
            inherited: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return inherited
        new_B = torch.ones_like(forward_batch.seq_lens)
        return self._with_sinks(q, k, v, layer, forward_batch, new_B, save_kv_cache, sinks)

    def _with_sinks(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, new_B: torch.Tensor, save_kv_cache: bool, sinks_H: torch.Tensor
    ) -> torch.Tensor:
        """Attend from the last ``new_B`` tokens of each request, in windows where the layer has them."""
        pool, window = self.token_to_kv_pool, layer.sliding_window_size
        window = window if _is_windowed(window) else None
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        slots_BL = self.req_to_token_pool.req_to_token[batch.req_pool_indices, : int(batch.seq_lens.max())]
        if window is not None and self.use_sliding_window_kv_pool:
            # Layers with windows have a smaller cache of their own.
            slots_BL = pool.translate_loc_from_full_to_swa(slots_BL)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        query_THD = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output_THE = torch.empty_like(query_THD)
        starts = [0, *new_B.cumsum(0).tolist()]
        rows = range(len(new_B))
        alike = [slice(None)] if _fits_padded(batch.seq_lens, new_B) else [slice(row, row + 1) for row in rows]
        for some in alike:
            tokens = slice(None) if len(alike) == 1 else slice(starts[some.start], starts[some.stop])
            extend_all(
                query_THD[tokens], output_THE[tokens], keys, values, slots_BL[some], batch.seq_lens[some], new_B[some],
                layer.scaling, window=window, sinks_H=sinks_H,
            )  # fmt: skip
        return output_THE.flatten(1)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """Do the same as the inherited method, into ``output``; what cannot be padded cheaply is left to that one."""
        is_plain = causal and not is_cross_attn and encoder_lens is None
        if is_plain and not _is_windowed(sliding_window_size) and _fits_padded(seq_lens, extend_seq_lens):
            slots = req_to_token[req_pool_indices]
            extend_all(query, output, k_cache, v_cache, slots, seq_lens, extend_seq_lens, scaling)
            return output
        inherited: Any = super()._run_sdpa_forward_extend
        result: torch.Tensor = inherited(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip
        return result

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
        """Do the same as the inherited method, into ``output``; encoders and sliding windows are left to that one."""
        if encoder_lens is not None or is_cross_attn or _is_windowed(sliding_window_size):
            inherited: Any = super()._run_sdpa_forward_decode
            result: torch.Tensor = inherited(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return result
        decode_all(query, output, k_cache, v_cache, req_to_token[req_pool_indices], seq_lens, scaling)
        return output


def _is_windowed(sliding_window_size: int | None) -> bool:
    return sliding_window_size is not None and sliding_window_size > -1


def _fits_padded(lengths_B: torch.Tensor, new_B: torch.Tensor) -> bool:
    """Return whether several requests are so similar that padding them costs little."""
    num_rows, longest = len(lengths_B), int(lengths_B.max())
    padded = num_rows * longest * int(new_B.max())
    alone = int((lengths_B * lengths_B).sum())
    return num_rows > 1 and num_rows * longest <= PADDED_TOKENS and padded <= PADDED_MOST * alone and int(new_B.min()) > 0
