"""Biases of routers that move against the load of experts: by hand, in a model, and where they are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo.moe.bias_balance import BIAS, BiasBalance
from gspo.moe.experts import ExpertPicks, ExpertRecorder, load_of
from gspo.moe.mixture import BIASED_ROUTERS
from gspo_services.learner.start import parallelism_of, require_adaptable, require_supported
from gspo_services.shared.settings.sections import Learner, LoraSection
from tests.support.policy.families import FAMILIES, MORE_SHARED, family_config

RATE = 0.25
"""A sum of such steps is exact."""


def alone(tensor: Tensor) -> Tensor:
    return tensor


def tiny(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**family_config(kind)), dtype=dtype)


def biases(model: Any) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)]


def test_a_bias_rises_below_the_mean_load_of_all_ranks_and_falls_above_it() -> None:
    model = tiny("glm4_moe")
    (bias,) = biases(model)
    before = bias.clone()
    balance = BiasBalance(model, RATE)
    # Expert 7 is chosen at a position that does not count; 16 picks of 8 experts have the mean 2.
    picks = torch.tensor([[[0, 1], [0, 1], [0, 2], [0, 2], [7, 7]]], dtype=torch.int8)
    balance.count(ExpertPicks(picks[:, :2], 8), torch.tensor([True, True]))
    balance.count(ExpertPicks(picks[:, 2:], 8), torch.tensor([True, True, False]))
    other = torch.tensor([[0.0, 0, 0, 0, 3, 2, 2, 1]], dtype=torch.float64)
    balance.step(lambda own: own + other)
    assert ((bias - before) / RATE).tolist() == [-1, 0, 0, 1, -1, 0, 0, 1]
    balance.step(alone)
    assert ((bias - before) / RATE).tolist() == [-1, 0, 0, 1, -1, 0, 0, 1], "nothing was counted since"


@pytest.mark.parametrize("kind", ["glm4_moe", "minimax_m2"])
def test_experts_that_are_overrun_are_left_to_others(kind: str) -> None:
    model = tiny(kind)
    for bias in biases(model):
        bias[:2] += 0.2
    recorder, balance = ExpertRecorder(model), BiasBalance(model, 0.01)
    ids = torch.randint(3, 60, (1, 64), generator=torch.Generator().manual_seed(1))
    mask, largest = torch.ones(64, dtype=torch.bool), []
    for _ in range(40):
        with recorder.recording(), torch.no_grad():
            model(input_ids=ids)
        picks = recorder.take()
        assert picks is not None
        load = load_of(picks, mask).double()
        largest.append(float((load.amax(dim=1) / load.mean(dim=1)).max()))
        balance.count(picks, mask)
        balance.step(alone)
    assert largest[0] > 3
    assert largest[-1] < 2


def test_families_with_such_a_bias_are_those_that_are_accepted() -> None:
    found = {kind for kind in FAMILIES | MORE_SHARED if biases(tiny(kind, "meta"))}
    assert found == BIASED_ROUTERS


def test_a_router_without_a_bias_or_with_a_coarse_one_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"mlp\.gate \(Qwen3MoeTopKRouter\) has no bias .*expert_bias_rate = 0"):
        BiasBalance(tiny("qwen3_moe", "meta"), RATE)
    with pytest.raises(ValueError, match=r"is bfloat16 here, .* learner.dtype = 'float32'"):
        BiasBalance(tiny("minimax_m2", "meta", torch.bfloat16), RATE)
    with pytest.raises(ValueError, match=r"choices cannot be recorded; set objective.expert_bias_rate = 0"):
        BiasBalance(tiny("glm4_moe", "meta"), RATE).count(None, torch.ones(1, dtype=torch.bool))


def test_other_families_and_adapters_are_refused_before_anything_is_loaded() -> None:
    rest: dict[str, Any] = {"num_ranks": 1, "expert_parallel": 1, "routing_replay": False, "moves_biases": True}
    require_supported(parallelism_of(family_config("deepseek_v3"), **rest))
    with pytest.raises(ValueError, match=re.escape("model_type is 'qwen3_moe': routers with a bias")):
        require_supported(parallelism_of(family_config("qwen3_moe"), **rest))
    lora = LoraSection(rank=4, target_modules=["attention"])
    with pytest.raises(ValueError, match=r"adapters leave the routers as they are; set objective.expert_bias_rate = 0"):
        require_adaptable(family_config("glm4_moe"), lora, Learner(), moves_biases=True)
    require_adaptable(family_config("glm4_moe"), lora, Learner())
