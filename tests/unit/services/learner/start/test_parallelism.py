"""What can be trained together, as docs/guide/learner.md says."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.model_files.configuration import read_config
from gspo_services.learner.start import autoep_config
from gspo_services.learner.start.autoep import AUTOEP_TRIED
from gspo_services.learner.start.parallelism import (
    Parallelism,
    offload_config,
    parallelism_of,
    require_supported,
)
from gspo_services.shared.settings.sections import Learner

PLAN = Parallelism(
    num_ranks=4,
    expert_parallel=2,
    routing_replay=False,
    model_type="qwen3_moe",
    num_experts=8,
)
TRIED = re.escape(f"(tried with {AUTOEP_TRIED})")
DOCS = Path(__file__).parents[5] / "docs" / "guide" / "learner.md"


def refusal(plan: Parallelism, **learner: Any) -> str:
    try:
        Learner.model_validate({"zero_stage": 3} | learner)
        require_supported(plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("num_ranks", "expert_parallel"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 8)])
def test_every_expert_parallel_size_that_divides_is_accepted(num_ranks: int, expert_parallel: int) -> None:
    plan = replace(PLAN, num_ranks=num_ranks, expert_parallel=expert_parallel)
    assert refusal(plan) == ""
    assert refusal(replace(plan, routing_replay=True)) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_parallel": 0}, "expert_parallel is 0; it must be 1 .off. or a number of ranks"),
        (
            {"expert_parallel": 3, "num_ranks": 3},
            r"expert_parallel is 3, .* the model's experts \(8\); use one of 1, 2, 4, 8",
        ),
        ({"expert_parallel": 4, "num_ranks": 2}, r"expert_parallel is 4, .* learner.num_ranks \(2\); use one of 1, 2$"),
        (
            {"model_type": "llama4_text"},
            f"expert_parallel is 2 and model_type is 'llama4_text': .*{TRIED} applies .* output, .* their input; use exp",
        ),
        ({"model_type": "nemotron_h"}, f"{TRIED} needs experts with a gate, which Nemotron-H has not; use expert_par"),
        ({"model_type": "flex_olmo"}, "'flex_olmo': it was compared with the plain model for qwen3_moe, .* alone; use exp"),
        ({"model_type": "qwen3", "num_experts": 0}, "expert_parallel is 2 and a qwen3 model has no experts; use .*= 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu, or expert_parallel 1"),
        (
            {"expert_parallel": 1, "num_experts": 0, "routing_replay": True},
            "routing_replay is on and a qwen3_moe model has no routers",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_the_value_and_the_way_out(changes: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(replace(PLAN, **changes)))


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_routers_are_those_of_every_family(key: str) -> None:
    plan = parallelism_of(
        {"model_type": "glm4_moe", key: 8}, num_ranks=1, expert_parallel=1, routing_replay=True, load_balance=True,
        scales_routers=True,
    )  # fmt: skip
    assert refusal(plan) == ""


def test_families_are_tried_with_the_release_of_deepspeed_that_is_installed() -> None:
    locked = DOCS.parents[2] / "requirements" / "deepspeed.txt"
    assert f"deepspeed=={AUTOEP_TRIED} " in locked.read_text(encoding="utf-8")


def test_without_expert_parallelism_any_model_is_accepted() -> None:
    for model_type, num_experts in (("qwen3", 0), ("mixtral", 8), ("qwen3_moe", 7)):
        plan = replace(PLAN, expert_parallel=1, num_ranks=3, model_type=model_type, num_experts=num_experts)
        assert refusal(plan) == ""


def test_a_models_configuration_says_how_many_experts_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mixtral", "num_local_experts": 8, "hidden_act": "silu"})
    )
    rest: dict[str, Any] = {"num_ranks": 1, "expert_parallel": 1, "routing_replay": False}
    assert parallelism_of(read_config(tmp_path), **rest).num_experts == 8
    assert parallelism_of({"model_type": "qwen3_moe", "num_experts": 4}, **rest).num_experts == 4
    plan = parallelism_of({"model_type": "qwen3"}, scales_routers=True, **rest)
    assert plan.scales_routers
    assert (plan.num_experts, plan.hidden_act) == (0, "silu")


@pytest.mark.parametrize("content", ["", "[]", None])
def test_a_directory_without_a_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_gates_are_normalised_as_the_models_configuration_says_not_as_the_preset_does() -> None:
    for normalised in (True, False):
        config = autoep_config(2, {"model_type": "qwen3_moe", "norm_topk_prob": normalised}, on_cuda=False)
        assert config["route_norm"] is normalised
        assert (config["autoep_size"], config["preset_model"]) == (2, "qwen3_moe")


def test_offload_names_what_deepspeed_keeps_in_host_memory() -> None:
    host = {"device": "cpu", "pin_memory": True}
    assert offload_config("none", pin_memory=True) == {}
    assert offload_config("optimizer", pin_memory=True) == {"offload_optimizer": host}
    both = offload_config("optimizer_and_parameters", pin_memory=True)
    assert both == {"offload_optimizer": host, "offload_param": host}


DENSE = {"expert_parallel": 1, "model_type": "qwen3", "num_experts": 0}


@pytest.mark.parametrize(
    ("changes", "learner", "part"),
    [
        ({}, {"zero_stage": 0}, ""),
        ({}, {"zero_stage": 1}, ""),
        ({}, {"zero_stage": 2}, ""),
        ({}, {"dtype": "bfloat16"}, ""),
        ({}, {"offload": "optimizer"}, ""),
        ({}, {"offload": "optimizer", "zero_stage": 1}, ""),
        ({}, {"offload": "optimizer_and_parameters"}, ""),
        (DENSE, {}, ""),
        ({}, {"dtype": "bfloat16", "zero_stage": 0}, "use zero_stage 1 or higher"),
        ({}, {"offload": "optimizer", "zero_stage": 0}, "use zero_stage 1 or higher"),
        ({}, {"offload": "optimizer_and_parameters", "zero_stage": 2}, "use zero_stage 3, or offload = optimizer"),
        ({"num_ranks": 3}, {}, "does not divide learner.num_ranks (3); use one of 1, 3"),
        ({"num_experts": 7}, {}, "does not divide the model's experts (7); use one of 1, 7"),
        ({"scales_routers": True}, {}, ""),
        (DENSE | {"scales_routers": True}, {}, "needs a mixture of experts; set learner.router_rate_factor = 1"),
        (DENSE | {"routing_replay": True}, {}, "needs a mixture of experts; set objective.routing_replay = false"),
    ],
)
def test_a_combination_works_or_is_refused_with_the_way_out(
    changes: dict[str, Any], learner: dict[str, Any], part: str
) -> None:
    found = refusal(replace(PLAN, **changes), **learner)
    assert part in found
    assert bool(found) == bool(part)
