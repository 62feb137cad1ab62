"""What a configuration says of its experts, held against the models that transformers makes of it."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gspo.moe.mixture import Mixture, mixture_of

ELSEWHERE: Final = frozenset({"inkling_text", "longcat_flash"})
"""Shared experts are stacked like the others, or a layer has two lists of them."""
LEAST_FAMILIES: Final = 35


def made(kind: str) -> Any:
    """A model of a family's own defaults, without memory; None for a dense one, and where the defaults are no model."""
    if not any("expert" in field.name for field in fields(CONFIG_MAPPING[kind])):
        return None
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    except TypeError:
        return None


def expert_layers(model: Any) -> dict[int, set[int]]:
    """The numbers of experts, by layer."""
    found: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        if layer is not None and parameter.dim() == 3 and ("experts" in name or "block_sparse" in name):
            found.setdefault(int(layer[1]), set()).add(parameter.shape[0])
    return found


def test_every_family_of_transformers_has_the_experts_that_are_read() -> None:
    mixtures = 0
    for kind in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING) - ELSEWHERE):
        model = made(kind)
        if model is not None:
            mixture = mixture_of(model.config.to_dict())
            layers = set(range(model.config.num_hidden_layers)) - mixture.dense_layers if mixture else set()
            assert expert_layers(model) == {layer: {mixture.experts} for layer in layers}, kind
            mixtures += bool(mixture)
    assert mixtures >= LEAST_FAMILIES


def test_no_other_module_reads_these_keys() -> None:
    names = [f'"{name}"' for name in ("num_experts", "num_local_experts", "n_routed_experts", "first_k_dense_replace")]
    own = Path(mixture_of.__code__.co_filename).resolve()
    assert [name for name in names if name not in own.read_text()] == []
    others = [
        path for room in ("gspo", "services", "protocol") for path in (own.parents[2] / room).rglob("*.py") if path != own
    ]
    assert len(others) > 500
    assert [str(path) for path in others if any(name in path.read_text() for name in names)] == []


@pytest.mark.parametrize(
    ("config", "mixture"),
    [
        ({}, Mixture()),
        ({"num_experts": None, "num_hidden_layers": 3}, Mixture()),
        ({"num_experts": 4, "is_moe": False}, Mixture()),
        (
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 3},
            Mixture(experts=4, chosen=2, width=8, shared_width=24),
        ),
        (
            {"num_local_experts": 4, "intermediate_size": 8, "num_hidden_layers": 4, "decoder_sparse_step": 2},
            Mixture(experts=4, chosen=4, width=8, dense_layers=frozenset({0, 2})),
        ),
        (
            {"num_experts": 4, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 5},
            Mixture(experts=4, chosen=4, shared_width=5, shared_gate=True, dense_layers=frozenset({1})),
        ),
    ],
)
def test_numbers_are_found_under_the_names_of_each_family(config: dict[str, Any], mixture: Mixture) -> None:
    assert mixture_of(config) == mixture


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_experts": "eight"}, "num_experts is eight: expected a number"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": 4, "num_experts_per_tok": -1}, "num_experts_per_tok is -1"),
        ({"num_experts": 4, "num_hidden_layers": 2**50}, "num_hidden_layers is"),
        ({"num_experts": 4, "num_hidden_layers": 2, "decoder_sparse_step": [2]}, r"decoder_sparse_step is \[2\]"),
        ({"num_experts": 4, "num_hidden_layers": 2**39}, "num_hidden_layers is 549755813888: at most 10,000"),
        (
            {"num_experts": 4, "scoring_func": "tanh"},
            "scoring_func is tanh: .* with softmax or",
        ),
        ({"num_experts": 4, "topk_method": "best"}, "topk_method is best"),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 4, "scoring_func": "softmax"},
            "softmax: .* with sigmoid;",
        ),
        ({"model_type": "deepseek_v3", "n_routed_experts": 4, "moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 experts a token of 4"),
        ({"n_routed_experts": 6, "n_group": 4, "topk_group": 2}, "n_group is 4 and topk_group 2"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mixture_of(config)
