"""What SGLang has for GPUs alone in some families of models, in torch: put in place when such a model is built.

Each of these families was compared with transformers on a CPU (``tests/families``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from gspo_services.shared.sglang_cpu.gated_delta import (
    TorchGatedDelta,
    convolve,
    convolve_one,
    gates,
    normed_and_gated,
)

GATED_DELTA: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types with gated linear attention."""
_SINKS: Final = "gpt_oss"


def set_arguments(server_args: Any, model_type: str) -> None:
    """Set what a server of this family needs on a CPU; call it before SGLang looks at its arguments."""
    if model_type in GATED_DELTA:
        # A prefix has a state, which SGLang keeps with kernels for GPUs only. By default it rounds inputs to bfloat16.
        server_args.disable_radix_cache = True
        server_args.mamba_ssm_dtype = "float32"
        os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    if model_type == _SINKS:
        _accept_attention_with_sinks()


def patch_when_built(loader: Any) -> None:
    """Let SGLang's module ``model_loader.loader`` patch a family before the first model of it is built.

    Any earlier, imports of SGLang's models would be circular.
    """
    build: Callable[..., torch.nn.Module] = loader._initialize_model
    waiting = dict(_PATCHES)

    def _initialize_model(model_config: Any, *others: Any, **more: Any) -> torch.nn.Module:
        patch = waiting.pop(str(model_config.hf_text_config.model_type), None)
        if patch is not None:
            patch()
        return build(model_config, *others, **more)

    loader._initialize_model = _initialize_model


def _accept_attention_with_sinks() -> None:
    """SGLang refuses gpt-oss with ``torch_native``, whose sinks are in this package."""
    from sglang.srt.arg_groups import model_hook

    of: Callable[[Any], tuple[Any, Any]] = model_hook.attention_backends_of
    known = ("torch_native", "torch_native")
    model_hook.attention_backends_of = lambda view: ("triton", "triton") if of(view) == known else of(view)


def _patch_gated_delta() -> None:
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.models import qwen2_moe, qwen3_5, qwen3_next

    gdn_backend.TritonGDNKernel = TorchGatedDelta
    gdn_backend.causal_conv1d_fn = convolve
    gdn_backend.causal_conv1d_update = convolve_one
    gdn_backend.fused_gdn_gating = gates
    layernorm_gated.RMSNorm.forward = fused_norm_gate.FusedRMSNormGated.forward = _gated_norm
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    qwen3_next.fused_qkvzba_split_reshape_cat = split_by_groups
    # Then it takes its own way in torch.
    qwen3_5._GDN_FUSED_QKVZBA_RATIOS = ()
    qwen3_5.fused_sigmoid_mul = times_sigmoid


def _patch_sinks() -> None:
    """SGLang rounds sinks to bfloat16, which shows in the fourth digit of log-probs: here they are as the model is."""
    from sglang.srt.models import gpt_oss

    initialise: Callable[..., None] = gpt_oss.GptOssAttention.__init__

    def __init__(self: Any, *others: Any, **more: Any) -> None:
        initialise(self, *others, **more)
        self.sinks.data = self.sinks.data.to(torch.get_default_dtype())

    gpt_oss.GptOssAttention.__init__ = __init__


def _patch_wide_norms() -> None:
    from sglang.srt.models import minimax_m2

    minimax_m2.rms_sumsq_serial = squares
    minimax_m2.rms_apply_serial = normed_over_heads


_PATCHES: Final[Mapping[str, Callable[[], None]]] = {
    **dict.fromkeys(GATED_DELTA, _patch_gated_delta),
    _SINKS: _patch_sinks,
    "minimax_m2": _patch_wide_norms,
}


def _gated_norm(self: Any, x: torch.Tensor, z: torch.Tensor, **others: Any) -> torch.Tensor:
    return normed_and_gated(x, self.weight, z, self.eps, self.activation)


def split_by_groups(
    qkvz: torch.Tensor, ba: torch.Tensor, num_keys: int, num_values: int, key_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection that has q, k, v, z (and b, a) of one head of keys after the other; q, k and v stay together."""
    tokens, in_group = len(qkvz), num_values // num_keys
    sizes = [key_size, key_size, in_group * value_size, in_group * value_size]
    q, k, v, z = qkvz.view(tokens, num_keys, -1).split(sizes, dim=-1)
    b, a = ba.view(tokens, num_keys, -1).split([in_group, in_group], dim=-1)
    together = torch.cat([each.reshape(tokens, -1) for each in (q, k, v)], dim=-1)
    return together, z.reshape(tokens, num_values, value_size), b.reshape(tokens, -1), a.reshape(tokens, -1)


def add_gated(x: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, output: torch.Tensor) -> None:
    """Add the shared expert's output, times its gate, to ``output``."""
    output += shared * functional.linear(x, gate_weight.view(1, -1)).sigmoid()


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``gate`` may have its heads apart."""
    return x * gate.reshape(x.shape).sigmoid()


def squares(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The squared length of each token's queries and keys over this rank's heads, [2, T]."""
    return torch.stack([x.float().square().sum(-1) for x in (q, k)])


def normed_over_heads(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, squares: torch.Tensor,
    ranks: int = 1, least: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Queries and keys over the root mean square of all heads; ``squares`` is the sum over all ranks."""

    def normed(x: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(sums / (x.shape[-1] * ranks) + least)
        return (x.float() * scale[:, None] * weight.float()).to(x.dtype)

    return normed(q, q_weight, squares[0]), normed(k, k_weight, squares[1])
