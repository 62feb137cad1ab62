"""Adapters in every family: what a version or an export has of them is what the adapted model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.model.lora import TARGETS, LoraPlan, adapted_weights, inject_lora, merged
from gspo_services.learner.start import require_adaptable
from gspo_services.shared.estimates import ShapeError, shape_of
from gspo_services.shared.settings import Learner, LoraSection
from tests.support.policy.architectures import ARCHITECTURES, tiny_model
from tests.support.policy.families import FAMILIES, family_config

pytestmark = pytest.mark.families
IDS: Final = torch.arange(24)[None] * 7 % 60
RANK: Final = 2
NAMES: Final = [*FAMILIES, *ARCHITECTURES]


def made(name: str) -> Any:
    if name in ARCHITECTURES:
        return tiny_model(name).eval()
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**family_config(name))).float().eval()


def is_accepted(config: dict[str, Any], target: str) -> bool:
    lora = LoraSection.model_validate({"rank": RANK, "target_modules": [target]})
    try:
        require_adaptable(config, lora, Learner())
    except ValueError:
        return False
    return True


def outcome(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapted_model_computes_what_its_merged_weights_do(name: str, target: str) -> None:
    model, again = made(name), made(name)
    plan = LoraPlan(rank=RANK, alpha=4.0, target_modules=(target,))
    config = model.config.to_dict()
    accepted = is_accepted(config, target)
    assert outcome(lambda: inject_lora(model, plan, seed=1)) == accepted
    if not accepted:
        return
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if ".lora_B." in own:
                parameter.normal_(0.0, 0.1, generator=generator)
        before, adapted = again(IDS).logits, model(IDS).logits
        parameters = dict(again.named_parameters())
        for own, weight in adapted_weights(model).items():
            parameters[own].copy_(merged(parameters[own], weight, weight.lora_a, weight.lora_b))
        assert (again(IDS).logits - adapted).abs().max() < 2e-5
    assert (before - adapted).abs().max() > 0.05
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    try:
        assert shape_of(config).lora_parameters(RANK, [target]) == trained
    except ShapeError:
        assert name not in FAMILIES
