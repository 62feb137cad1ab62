"""Gated linear attention (Qwen3-Next, Qwen3.5) in plain torch, in place of kernels for GPUs: all requests of a step at once.

Requests lie end to end; here they are rows, padded on the right with zeros, which change no state. Between steps each
request has a slot with the last inputs of its convolution and one with its state. A token of a head changes that state S
to ``exp(g) S + beta (v - exp(g) S k) k^T``, and gets ``S q``: the gated delta rule (arXiv 2412.06464), token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

_LEAST: Final = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True)
class RequestRows:
    """The places of T tokens end to end in rows of B requests: [B, L], L tokens of the longest."""

    is_token_BL: torch.Tensor
    lengths_B: torch.Tensor

    @classmethod
    def of(cls, starts: torch.Tensor) -> RequestRows:
        """``starts``: where each request begins, and the end of the last; [B + 1]."""
        lengths_B = starts.diff().long()
        return cls(torch.arange(int(lengths_B.max())) < lengths_B[:, None], lengths_B)

    def padded(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T, ...] as [B, L, ...]; zeros where there is no token."""
        rows = values_T.new_zeros(*self.is_token_BL.shape, *values_T.shape[1:])
        rows[self.is_token_BL] = values_T
        return rows


def convolve(
    x_CT: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    activation: str = "silu",
    **others: Any,
) -> torch.Tensor:
    """Convolve each request over its last W tokens, and leave its last W - 1 inputs in its slot of ``conv_states``
    [S, C, W - 1]. SGLang's ``causal_conv1d_fn``; the result is [C, T].
    """
    rows, slots_B = RequestRows.of(query_start_loc), cache_indices.long()
    before_BCW = torch.where(has_initial_state[:, None, None], conv_states[slots_B], 0).to(x_CT.dtype)
    line_BCL = torch.cat([before_BCW, rows.padded(x_CT.T).transpose(1, 2)], dim=-1)
    made_BLC = functional.conv1d(line_BCL, weight_CW[:, None], bias_C, groups=len(weight_CW)).transpose(1, 2)
    width = conv_states.shape[-1]
    last_BW = rows.lengths_B[:, None] + torch.arange(width)
    conv_states[slots_B] = line_BCL.gather(2, last_BW[:, None].expand(-1, line_BCL.shape[1], -1)).to(conv_states.dtype)
    return activated(made_BLC[rows.is_token_BL], activation).T


def convolve_one(
    x_BC: torch.Tensor,
    conv_states: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    conv_state_indices: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    """The same for one new token of each request. SGLang's ``causal_conv1d_update``."""
    slots_B = conv_state_indices.long()
    line_BCW = torch.cat([conv_states[slots_B].to(x_BC.dtype), x_BC[..., None]], dim=-1)
    conv_states[slots_B] = line_BCW[..., 1:].to(conv_states.dtype)
    made_BC = (line_BCW * weight_CW).sum(-1)
    return activated(made_BC if bias_C is None else made_BC + bias_C, activation)


def gates(
    A_log: torch.Tensor, a_TG: torch.Tensor, b_TG: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each head's decay, and beta: each [1, T, G] in float32. SGLang's ``fused_gdn_gating``."""
    decay_TG = -A_log.float().exp() * functional.softplus(a_TG.float() + dt_bias.float())
    return decay_TG[None], b_TG.float().sigmoid()[None]


def delta_rule(
    q_BLHK: torch.Tensor,
    k_BLHK: torch.Tensor,
    v_BLGV: torch.Tensor,
    decay_BLG: torch.Tensor,
    beta_BLG: torch.Tensor,
    state_BGVK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, L, G, V] and the last states, in float32. G heads of values share H of queries and keys."""
    in_group = v_BLGV.shape[2] // q_BLHK.shape[2]
    q_BLHK, k_BLHK = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST) for x in (q_BLHK.float(), k_BLHK.float()))
    q_BLGK = q_BLHK.repeat_interleave(in_group, 2) * q_BLHK.shape[-1] ** -0.5
    k_BLGK, v_BLGV = k_BLHK.repeat_interleave(in_group, 2), v_BLGV.float()
    kept_BLG, state = decay_BLG.float().exp(), state_BGVK.float()
    outputs = []
    for token in range(q_BLGK.shape[1]):
        k_BGK, beta_BG = k_BLGK[:, token], beta_BLG[:, token].float()
        state = state * kept_BLG[:, token, :, None, None]
        seen_BGV = (state @ k_BGK[..., None])[..., 0]
        change_BGV = (v_BLGV[:, token] - seen_BGV) * beta_BG[..., None]
        state = state + change_BGV[..., None] * k_BGK[:, :, None]
        outputs.append((state @ q_BLGK[:, token, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1), state


def normed_and_gated(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, least: float, activation: str
) -> torch.Tensor:
    """The root-mean-square norm of ``x``, times the activated gate."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + least) * weight.float()
    return (normed * activated(gate.float(), activation)).to(x.dtype)


def activated(x: torch.Tensor, name: str) -> torch.Tensor:
    """Raises: ValueError for a name other than silu, swish and sigmoid."""
    if name in ("silu", "swish"):
        return functional.silu(x)
    if name == "sigmoid":
        return x.sigmoid()
    raise ValueError(f"linear attention with activation {name}: silu, swish and sigmoid are known on a CPU")


class TorchGatedDelta:
    """The kernels of SGLang's gated linear attention, as its ``GDNKernelDispatcher`` calls them."""

    uses_state_checkpoints = supports_fused_chain_verify = supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = supports_packed_decode = False

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        """One new token of each request, [1, B, heads, size]; its slot of ``ssm_states`` gets the new state."""
        slots_B, (decay, beta) = cache_indices.long(), gates(A_log, a, b, dt_bias)
        q, k, v, decay, beta = (x.transpose(0, 1) for x in (q, k, v, decay, beta))
        output, states = delta_rule(q, k, v, decay, beta, ssm_states[slots_B])
        ssm_states[slots_B] = states.to(ssm_states.dtype)
        return output.transpose(0, 1).to(v.dtype)

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        **others: Any,
    ) -> tuple[torch.Tensor, None, None]:
        """The new tokens of each request, end to end, [1, T, heads, size]: one without a prefix begins with zeros."""
        rows, slots_B = RequestRows.of(query_start_loc), cache_indices.long()
        before = torch.where((extend_prefix_lens > 0)[:, None, None, None], ssm_states[slots_B], 0)
        dtype = v.dtype
        q, k, v, g, beta = (rows.padded(x[0]) for x in (q, k, v, g, beta))
        output, states = delta_rule(q, k, v, g, beta, before)
        ssm_states[slots_B] = states.to(ssm_states.dtype)
        return output[rows.is_token_BL][None].to(dtype), None, None
