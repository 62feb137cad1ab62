"""What replaces kernels for GPUs in some families computes what transformers' classes of these families do."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gspo_services.shared.sglang_cpu.families import (
    add_gated,
    normed_over_heads,
    set_arguments,
    split_by_groups,
    squares,
    times_sigmoid,
)

CONV = "SGLANG_MAMBA_CONV_DTYPE"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_projection_of_groups_is_split_as_its_model_splits_it() -> None:
    config = Qwen3NextConfig(
        hidden_size=8, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=3, linear_value_head_dim=5
    )
    layer = Qwen3NextGatedDeltaNet(config, 0)
    qkvz, ba = drawn(4, 2 * (3 + 3 + 2 * 15)), drawn(4, 12, seed=1)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(qkvz[None], ba[None])
    together = torch.cat([each.reshape(4, -1) for each in (q, k, v)], dim=-1)
    for found, expected in zip(split_by_groups(qkvz, ba, 2, 6, 3, 5), (together, z[0], b[0], a[0]), strict=True):
        assert torch.equal(found, expected)


def test_norms_go_over_the_heads_of_all_ranks() -> None:
    q, k, q_weight, k_weight = drawn(3, 8), drawn(3, 4, seed=1), drawn(8, seed=2), drawn(4, seed=3)
    halves = [(q[:, :4], k[:, :2], q_weight[:4], k_weight[:2]), (q[:, 4:], k[:, 2:], q_weight[4:], k_weight[2:])]
    total = sum(squares(half[0], half[1]) for half in halves)
    assert isinstance(total, torch.Tensor)
    found = [normed_over_heads(*half, total, 2, 1e-6) for half in halves]
    for place, (whole, weight) in enumerate(((q, q_weight), (k, k_weight))):
        expected = torch.nn.functional.rms_norm(whole, whole.shape[-1:], weight, 1e-6)
        torch.testing.assert_close(torch.cat([each[place] for each in found], dim=-1), expected)


def test_gates_of_shared_experts_and_of_heads() -> None:
    x, weight, shared, output = drawn(3, 8), drawn(8, seed=1), drawn(3, 8, seed=2), drawn(3, 8, seed=3)
    expected = output + shared * (x @ weight).sigmoid()[:, None]
    add_gated(x, weight, shared, output)
    torch.testing.assert_close(output, expected)
    gate = drawn(3, 4, 2, 2, seed=4)[:, :, 0]
    assert torch.equal(times_sigmoid(x, gate), x * gate.reshape(3, 8).sigmoid())


@pytest.mark.parametrize(("kind", "is_set"), [("qwen3_5_text", True), ("qwen3_next", True), ("qwen3_moe", False)])
def test_states_are_float32_and_prefixes_not_kept_where_attention_is_linear(
    kind: str, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONV, "bfloat16")
    arguments = SimpleNamespace(disable_radix_cache=False, mamba_ssm_dtype=None)
    set_arguments(arguments, kind)
    assert vars(arguments) == {"disable_radix_cache": is_set, "mamba_ssm_dtype": "float32" if is_set else None}
    assert os.environ[CONV] == ("float32" if is_set else "bfloat16")
