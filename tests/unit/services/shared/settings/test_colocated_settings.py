"""What run.colocate refuses, each with its way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from gspo_services.shared.settings.sections import Learner, LoraSection, Rollout, Run, SecuritySection, Settings

ONE: dict[str, Any] = {"num_servers": 1}


@pytest.mark.parametrize(
    ("learner", "rollout", "said"),
    [
        ({"num_ranks": 2}, ONE, "the learner has 2 ranks: .*use learner.num_ranks = 1"),
        ({"zero_stage": 0}, ONE, "learner.zero_stage is 0 .*: without ZeRO, .*use learner.zero_stage = 2"),
        ({"zero_stage": 1, "dtype": "bfloat16"}, ONE, "zero_stage is 1 and .*'bfloat16': in bfloat16, .*zero_stage = 2"),
        ({"zero_stage": 3}, ONE, "learner.zero_stage is 3 .*: DeepSpeed's optimizer of ZeRO 3 .*use learner.zero_stage = 2"),
        ({}, ONE | {"server_url": "http://h:1"}, "rollout.server_url is http://h:1: .*leave server_url out"),
        ({}, {"num_servers": 2}, "rollout.num_servers is 2, with 1 ranks each: .*use rollout.num_servers = 1"),
        ({}, {"num_servers": 0}, "rollout.num_servers is 0"),
        ({}, ONE | {"tensor_parallel": 2}, "rollout.num_servers is 1, with 2 ranks each: .*tensor_parallel = 1"),
    ],
)
def test_what_cannot_be_colocated_is_refused(learner: dict[str, Any], rollout: dict[str, Any], said: str) -> None:
    def made(colocate: bool) -> Settings:
        return Settings(
            run=Run(colocate=colocate),
            learner=Learner(**learner),
            rollout=Rollout(**rollout),
            security=SecuritySection(allow_plaintext=True),
        )

    made(colocate=False)
    with pytest.raises(ValidationError, match=f"run.colocate is true and .*{said}.*; or set run.colocate = false"):
        made(colocate=True)


@pytest.mark.parametrize("learner", [{}, {"zero_stage": 2, "dtype": "bfloat16"}, {"zero_stage": 2, "offload": "optimizer"}])
def test_one_learner_and_one_server_may_be_colocated(learner: dict[str, Any]) -> None:
    assert Settings(run=Run(colocate=True), learner=Learner(**learner), rollout=Rollout(**ONE)).run.colocate


def test_adapters_as_versions_are_refused_because_the_engine_loses_the_model_below_them() -> None:
    with pytest.raises(
        ValidationError, match=r'lora\.publish is "adapter": .*use publish = "merged"; or set run\.colocate = false'
    ):
        Settings(run=Run(colocate=True), rollout=Rollout(**ONE), lora=LoraSection(rank=8, publish="adapter"))
