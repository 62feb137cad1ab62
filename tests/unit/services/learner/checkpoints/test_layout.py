"""What a checkpoint and a learner must have in common."""

import re
from typing import Any

import pytest
import torch

from gspo_services.learner.checkpoints.base_model import BaseDigest
from gspo_services.learner.checkpoints.layout import layout_problem

WHOLE: dict[str, Any] = {"model": "M", "parameters": "1f", "dtype": "float32", "optimizer": "AdamW"}
LORA = {"rank": 8, "alpha": 32.0, "target_modules": ["attention"]}
ADAPTED = WHOLE | {"parameters": "2e", "lora": LORA, "base": "aa", "base_path": "models/tiny"}


def test_the_same_layout_fits_and_the_place_of_the_model_does_not_matter() -> None:
    assert layout_problem(WHOLE, WHOLE) == ""
    assert layout_problem(ADAPTED, ADAPTED | {"base_path": "/elsewhere/tiny"}) == ""


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (WHOLE, WHOLE | {"dtype": "bfloat16"}, "was saved with dtype = float32, this learner has bfloat16; use the same"),
        (WHOLE, ADAPTED, "holds all weights, and lora.rank is 8; continue the run with lora.rank = 0, or start another"),
        (ADAPTED, WHOLE, r"holds adapters \(rank = 8, alpha = 32.0, .*\), and lora.rank is 0; continue"),
        (ADAPTED, ADAPTED | {"lora": LORA | {"rank": 4}}, r"rank = 8, .*, and \[lora\] says rank = 4, .*; use the same"),
        (ADAPTED, ADAPTED | {"lora": LORA | {"target_modules": ["experts"]}}, r"says .* target_modules = \['experts'\]"),
        (
            ADAPTED,
            ADAPTED | {"base": "bb", "base_path": "m"},
            "was at models/tiny, with digest aa; .* m has bb; name the one",
        ),
        (ADAPTED, ADAPTED | {"dtype": "bfloat16"}, "dtype = float32"),
    ],
)
def test_another_layout_is_named_with_both_values_and_the_way_out(
    saved: dict[str, Any], present: dict[str, Any], message: str
) -> None:
    assert re.search(message, layout_problem(saved, present))


def digest(**weights: torch.Tensor) -> bytes:
    base = BaseDigest()
    base.add_all(weights.items())
    return base.digest()


def test_a_models_digest_knows_names_types_shapes_and_every_bit_but_no_order() -> None:
    ones, twos = torch.ones(2, 3), torch.full((2,), 2.0)
    expected = digest(a=ones, b=twos)
    assert digest(b=twos, a=ones) == expected
    # Compared as whole tensors: a copy in another memory layout is the same weight.
    assert digest(a=torch.ones(3, 2).T, b=twos) == expected
    others = [
        digest(a=twos, b=ones),
        digest(a=ones.bfloat16(), b=twos),
        digest(a=ones.T, b=twos),
        digest(a=ones, b=torch.tensor([2.0, 2.0000002])),
        digest(a=ones),
    ]
    assert len({expected, *others}) == 6
