"""The dual clip and the mismatch weights with caps of their own: by hand, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.loss import LossOutput, gspo_loss
from gspo.mismatch import mismatch_weights
from gspo.settings import Objective
from gspo.staleness import clip_range


def loss_of(log_ratios: list[float], advantage: float, **options: object) -> tuple[LossOutput, list[float]]:
    """Of one sequence with token ratios, and the gradient by its log-probs."""
    logprobs_T = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    length = len(log_ratios)
    output = gspo_loss(
        logprobs_T,
        torch.zeros(length, dtype=torch.float64),
        torch.full((length,), advantage, dtype=torch.float64),
        torch.ones(length, dtype=torch.bool),
        torch.zeros(length, dtype=torch.int64),
        num_sequences=1,
        clip_range=clip_range(torch.zeros(1), eps_low=0.2, eps_high=0.27),
        ratio_unit="token",
        **options,  # type: ignore[arg-type]
    )
    (gradient_T,) = torch.autograd.grad(output.loss, logprobs_T)
    return output, gradient_T.tolist()


def test_a_large_ratio_of_a_negative_advantage_counts_as_c_and_gets_no_gradient() -> None:
    output, gradient = loss_of([math.log(5.0), math.log(2.0)], -1.0, dual_clip=3.0)
    assert output.loss.item() == pytest.approx((3.0 + 2.0) / 2)
    assert gradient == pytest.approx([0.0, 1.0])
    assert output.stats.dual_clipped_S.tolist() == [0.5]
    assert output.stats.clipped_high_S.tolist() == output.stats.clipped_low_S.tolist() == [0.0]


def test_a_positive_advantage_does_not_feel_the_dual_clip() -> None:
    with_it, gradient = loss_of([math.log(5.0), math.log(1.1)], 1.0, dual_clip=3.0)
    without, gradient_without = loss_of([math.log(5.0), math.log(1.1)], 1.0)
    assert with_it.loss.item() == without.loss.item() == pytest.approx(-(1.27 + 1.1) / 2)
    assert gradient == gradient_without
    assert with_it.stats.dual_clipped_S.tolist() == [0.0]


def test_each_mode_has_a_cap_of_its_own() -> None:
    caps = {"tis_cap": 1.5, "tis_token_cap": 2.5, "tis_product_cap": 3.5}
    for mode, cap in (("truncate", 1.5), ("reject", 1.5), ("truncate_tokens", 2.5), ("truncate_product", 3.5)):
        assert Objective(anchor="proximal", tis_mode=mode, **caps).weight_cap == cap  # type: ignore[arg-type]


def test_weights_of_tokens_are_each_tokens_own_and_their_mean_is_the_sequences() -> None:
    log_weights_T = torch.tensor([math.log(3.0), math.log(0.5), math.log(0.25), math.nan])
    found = mismatch_weights(
        log_weights_T,
        torch.zeros(4),
        torch.tensor([True, True, True, False]),
        torch.tensor([0, 0, 1, 1]),
        3,
        mode="truncate_tokens",
        cap=2.0,
    )
    assert found.weights_T is not None
    assert found.weights_T.tolist() == pytest.approx([2.0, 0.5, 0.25, 1.0])
    assert found.weights_S.tolist() == pytest.approx([1.25, 0.25, 1.0])
    assert found.rejected_S.tolist() == [False] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dual_clip": 1.0}, r"dual_clip is 1.0; give a finite number in \(1"),
        (
            {"dual_clip": 3.0, "log_ratio_clamp": 1.0},
            "ratios are clamped before they reach it. Set log_ratio_clamp above 1.1",
        ),
        ({"tis_token_cap": 1.0}, "tis_token_cap is 1.0"),
        ({"tis_product_cap": 0.5}, "tis_product_cap is 0.5"),
        ({"tis_mode": "truncate_tokens", "anchor": "behaviour"}, "a weight would count it twice"),
    ],
)
def test_a_bound_that_cannot_be_meant_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**fields)  # type: ignore[arg-type]


def test_weights_of_tokens_are_checked() -> None:
    for weight, message in ((-1.0, r"mismatch_weights_T\[1\] is -1.0"), (math.nan, r"mismatch_weights_T\[1\] is nan")):
        with pytest.raises(ValueError, match=message):
            loss_of([0.0, 0.0], 1.0, mismatch_weights_T=torch.tensor([1.0, weight]))
