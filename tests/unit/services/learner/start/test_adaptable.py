"""Which adapters are refused before a model is loaded."""

from typing import Any

import pytest

from gspo_services.learner.start import require_adaptable
from gspo_services.shared.settings import Learner, LoraSection

MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_hidden_layers": 2}
DENSE = {"model_type": "qwen3"}
MIXED = MOE | {"mlp_only_layers": [0]}


def refusal(config: dict[str, Any], targets: list[str], rank: int = 8, **learner: Any) -> str:
    try:
        lora = LoraSection.model_validate({"rank": rank, "target_modules": targets})
        require_adaptable(config, lora, Learner.model_validate(learner))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "targets", "learner"),
    [
        (MOE, ["attention", "experts"], {}),
        (DENSE, ["attention", "mlp"], {"zero_stage": 2}),
        (MIXED, ["attention", "experts"], {"zero_stage": 3}),
        ({"model_type": "mixtral", "num_local_experts": 8}, ["experts"], {}),
        (MOE, ["attention"], {"expert_parallel": 2, "zero_stage": 3}),
        (MOE, ["attention"], {"expert_parallel": 2, "zero_stage": 0}),
        (MOE, ["attention"], {"router_rate_factor": 0}),
    ],
)
def test_adapters_that_work_are_accepted(config: dict[str, Any], targets: list[str], learner: dict[str, Any]) -> None:
    assert refusal(config, targets, **learner) == ""


@pytest.mark.parametrize(
    ("config", "targets", "learner", "message"),
    [
        (DENSE, ["attention", "experts"], {}, "'experts' and a qwen3 model .* none; name some of attention, mlp$"),
        (MOE, ["mlp"], {}, "'mlp' and a qwen3_moe model .* none; name some of attention, experts$"),
        (MIXED, ["mlp"], {}, "'mlp' and some layers .* have experts, for which peft .*; name some of attention, experts$"),
        (MOE, ["experts"], {"expert_parallel": 2, "zero_stage": 3}, "'experts' and expert_parallel is 2: .*; use expert_p"),
        (MOE, ["attention"], {"expert_parallel": 2, "zero_stage": 1}, "zero_stage is 1: .*; use zero_stage = 3 or 0"),
        (MOE, ["attention"], {"expert_parallel": 4, "zero_stage": 2}, "expert_parallel is 4 and zero_stage is 2"),
        (MOE, ["attention"], {"router_rate_factor": 0.5}, "router_rate_factor is 0.5 and lora.rank is .* leave the routers"),
    ],
)
def test_adapters_that_cannot_work_are_refused_with_the_value_and_the_way_out(
    config: dict[str, Any], targets: list[str], learner: dict[str, Any], message: str
) -> None:
    import re

    assert re.search(message, refusal(config, targets, **learner))
    assert refusal(config, targets, rank=0, **learner) == "", "without adapters nothing is asked of them"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 8, "n_routed_experts": 4},
            "model has latent attention",
        ),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "has layers of linear attention"),
        (DENSE, ""),
    ],
)
def test_adapters_are_versions_only_where_slots_have_their_matrices(config: dict[str, Any], reason: str) -> None:
    lora = LoraSection.model_validate({"rank": 8, "target_modules": ["attention"], "publish": "adapter"})
    if not reason:
        require_adaptable(config, lora, Learner())
        return
    with pytest.raises(ValueError, match=f'{reason}: .*; set lora.publish = "merged"'):
        require_adaptable(config, lora, Learner())
