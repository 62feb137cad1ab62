"""A mixture of experts, computed from the parts of several ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from gspo_services.shared.sglang_cpu.experts import enable_local_experts, local_experts

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOICES = 5, 8, 6, 4, 2


def mixture() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES)
    return x, ids, weights, w13, w2


def test_the_parts_of_all_ranks_add_up_to_the_mixture() -> None:
    x, ids, weights, w13, w2 = mixture()
    whole = torch.zeros_like(x)
    for token in range(TOKENS):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            whole[token] += weight * (w2[expert] @ (functional.silu(gate) * up))
    half = EXPERTS // 2
    parts = [
        local_experts(x, torch.where(ids // half == rank, ids % half, -1), weights, w13[own], w2[own])
        for rank, own in enumerate((slice(0, half), slice(half, EXPERTS)))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_a_rank_with_all_experts_computes_as_before_and_others_refuse_what_they_do_not_know() -> None:
    x, ids, weights, w13, w2 = mixture()
    module: Any = SimpleNamespace(moe_forward_native=lambda *given: given)
    enable_local_experts(module)
    config = SimpleNamespace(activation="silu", apply_router_weight_on_input=False)
    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
    whole = SimpleNamespace(num_experts=EXPERTS, w13_weight=w13, w2_weight=w2)
    assert module.moe_forward_native(whole, x, topk, config) == (whole, x, topk, config)
    part = SimpleNamespace(num_experts=2 * EXPERTS, w13_weight=w13, w2_weight=w2)
    assert torch.equal(module.moe_forward_native(part, x, topk, config), local_experts(x, ids, weights, w13, w2))
    config.activation = "gelu"
    with pytest.raises(NotImplementedError, match=r"activation gelu.*rollout\.expert_parallel = 1"):
        module.moe_forward_native(part, x, topk, config)
