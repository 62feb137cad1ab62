"""Parameters from config.json of whatever transformers and SGLang have: those of transformers' model, or refused."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo_services.prepare.check.model import has_class
from gspo_services.shared.estimates import ShapeError, shape_of
from tests.support.policy.default_models import made

pytestmark = pytest.mark.families
SERVED = sorted(
    kind
    for kind in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)
    if has_class("sglang", kind, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]))
)


@pytest.mark.parametrize("kind", SERVED)
def test_parameters_are_within_a_hundredth_of_those_of_transformers_or_refused(kind: str) -> None:
    model = made(kind)
    try:
        estimated = shape_of(model.config.to_dict()).parameters
    except ShapeError:
        return
    assert estimated == pytest.approx(sum(parameter.numel() for parameter in model.parameters()), rel=0.01)
