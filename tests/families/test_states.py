"""Layers with a state: a model is refused by its configuration if, and only if, its layers would be refused."""

from typing import Final

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.model.linear_attention import by_rows
from gspo_services.learner.start import TRAINED_LAYERS, require_apart
from tests.support.policy.default_models import made

pytestmark = pytest.mark.families
ELSEWHERE: Final = frozenset({"phi4_multimodal"})
"""The convolutions are those of its ears."""
KINDS: Final = sorted((set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)) - ELSEWHERE)


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_and_layers_agree(kind: str) -> None:
    model = made(kind)
    config = model.config.to_dict()
    by_layers = by_config = bool(set(config.get("layer_types") or ()) - TRAINED_LAYERS)
    try:
        by_rows(model)
    except ValueError:
        by_layers = True
    try:
        require_apart(config)
    except ValueError:
        by_config = True
    assert by_config == by_layers
