"""Layers with a state: a model is refused by its configuration if, and only if, its layers would be refused."""

import warnings
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.model.linear_attention import by_rows
from gspo_services.learner.start import TRAINED_LAYERS, require_apart

pytestmark = pytest.mark.families
ELSEWHERE: Final = frozenset({"phi4_multimodal"})
"""The convolutions are those of its ears."""
KINDS: Final = sorted((set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)) - ELSEWHERE)


def made(kind: str) -> Any:
    """A model of the family's own defaults without memory, where they are one."""
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    except Exception as error:  # noqa: BLE001 - whatever the family misses
        pytest.skip(f"no default model: {error}"[:200])


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
