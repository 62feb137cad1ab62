"""Models of every family of transformers, in the family's own defaults."""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def made(kind: str) -> Any:
    """A model of the family's own defaults without memory, where they are one."""
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    except Exception as error:  # noqa: BLE001 - whatever the family misses
        pytest.skip(f"no default model: {error}"[:200])
