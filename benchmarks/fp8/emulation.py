"""FP8 as SGLang has it for checkpoints in blocks (W8A8), computed in float32.

Weights are rounded to e4m3 with a scale for each block of 128 x 128, inputs with one for each 128 values of a token.
Products of rounded numbers are summed in float32, as on a GPU, in another order. The router, embeddings, norms, attention
and the head stay as they are, as in SGLang.

``hook`` is for SGLang's own --forward-hooks: it gives each projection and each mixture of experts the output that FP8 has.
The parameters are not touched, so the checksums that a rollout verifies are of the weights that were sent, and what is
multiplied is a function of these weights alone.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

BLOCK: Final = 128
LARGEST: Final = 448.0
"""The largest number of e4m3."""
LEAST: Final = 1e-12
"""The least magnitude that a scale is made for, so that a block of zeros has one."""
MODULES: Final = ("model.layers.*.self_attn.qkv_proj", "model.layers.*.self_attn.o_proj", "model.layers.*.mlp.experts")
"""What SGLang computes in FP8 of Qwen3-MoE."""


def block_scales(x: Tensor, rows: int = BLOCK, columns: int = BLOCK) -> Tensor:
    """Return the scale of each block of ``x`` [..., N, K]: float32 [..., N / rows, K / columns], rounded up."""
    *others, n, k = x.shape
    padded = functional.pad(x.abs().float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.reshape(*others, padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns)
    return blocks.amax(dim=(-3, -1)).clamp(min=LEAST) / LARGEST


def quantised(x: Tensor, scales: Tensor, rows: int = BLOCK, columns: int = BLOCK) -> Tensor:
    """Return ``x`` [..., N, K] divided by its blocks' scales, as torch.float8_e4m3fn."""
    return (x.float() / _spread(scales, x, rows, columns)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def dequantised(q: Tensor, scales: Tensor, rows: int = BLOCK, columns: int = BLOCK) -> Tensor:
    """Return the float32 numbers that ``q`` and its scales stand for."""
    return q.float() * _spread(scales, q, rows, columns)


def rounded(x: Tensor, rows: int = BLOCK) -> Tensor:
    """Return ``x`` [..., N, K] as its type, rounded to FP8 in blocks of ``rows`` x 128; 1 row is for inputs, [T, K]."""
    scales = block_scales(x, rows)
    return dequantised(quantised(x, scales, rows), scales, rows).to(x.dtype)


def _spread(scales: Tensor, x: Tensor, rows: int, columns: int) -> Tensor:
    spread = scales.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
    return spread[..., : x.shape[-2], : x.shape[-1]]


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the product of both, rounded: [T, N]."""
    return functional.linear(rounded(x_TK, rows=1), rounded(weight_NK))


def experts(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13_EIH: Tensor, w2_EHI: Tensor) -> Tensor:
    """Return a mixture's output, [T, H], with inputs, weights and hidden values rounded. ``w13_EIH``: gate above up."""
    output_TH, x_TH = torch.zeros_like(x_TH), rounded(x_TH, rows=1)
    for expert in ids_TK.unique().tolist():
        tokens, choices = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x_TH[tokens], rounded(w13_EIH[expert])).chunk(2, dim=-1)
        made = linear(functional.silu(gate) * up, w2_EHI[expert])
        output_TH.index_add_(0, tokens, made * weights_TK[tokens, choices, None].to(made.dtype))
    return output_TH


def hook(config: dict[str, Any]) -> Callable[[Any, tuple[Any, ...], Any], Any]:
    """Return a forward hook of PyTorch (SGLang's ``hook_factory``); ``config`` has nothing."""
    return _in_fp8


def _in_fp8(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    if hasattr(module, "w13_weight"):
        weights_TK, ids_TK, _ = inputs[1]
        return experts(inputs[0], ids_TK, weights_TK, module.w13_weight, module.w2_weight)
    if module.bias is not None:
        raise NotImplementedError("a projection with a bias: the emulation knows none")
    return linear(inputs[0], module.weight), output[1]
