"""Runs a mixture's experts on a rank that has only some of them (expert parallelism), in plain torch.

SGLang's own reference counts tokens per expert over all experts of the model. Its dispatcher has by then given the experts
of this rank the numbers from 0 on, and those of other ranks -1, on which that count fails.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

_ACTIVATION: Final = "silu"


def enable_local_experts(fused_moe_native: Any) -> None:
    """Let ``moe_forward_native`` of SGLang's module ``fused_moe_native`` also work on a part of the experts."""
    forward: Callable[..., torch.Tensor] = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        if layer.w13_weight.shape[0] == layer.num_experts:
            return forward(layer, x, topk_output, moe_runner_config)
        activation = moe_runner_config.activation
        if activation != _ACTIVATION or moe_runner_config.apply_router_weight_on_input or hasattr(layer, "w13_weight_bias"):
            raise NotImplementedError(
                f"experts with activation {activation}, biases or weighted inputs cannot be spread over ranks on a CPU: "
                "use rollout.expert_parallel = 1"
            )
        return local_experts(x, topk_output.topk_ids, topk_output.topk_weights, layer.w13_weight, layer.w2_weight)

    fused_moe_native.moe_forward_native = moe_forward_native


def local_experts(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13_EIH: torch.Tensor,
    w2_EHI: torch.Tensor,
) -> torch.Tensor:
    """Return this rank's part of the mixture's output, [T, H]: the sum over ranks is the whole.

    ``ids_TK``: places among the E experts of this rank; negative: another rank's. ``w13_EIH``: gate above up.
    """
    output_TH = torch.zeros_like(x_TH)
    for expert, (w13_IH, w2_HI) in enumerate(zip(w13_EIH, w2_EHI, strict=True)):
        tokens, choices = (ids_TK == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = functional.linear(x_TH[tokens], w13_IH).chunk(2, dim=-1)
            made = functional.linear(functional.silu(gate) * up, w2_HI)
            output_TH.index_add_(0, tokens, made * weights_TK[tokens, choices, None].to(made.dtype))
    return output_TH
