"""VESPO and M2PO beside what their authors' own programs do, step by step, on padded rows; and where numbers end.

Written after FloyedShen/VESPO, recipe/vespo/code/core_algos.py at aa1f304 (``compute_policy_loss_vespo``), and
Infini-AI-Lab/M2PO, verl/trainer/ppo/core_algos.py at af54a3e (``compute_m2po_policy_loss`` and what it calls), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gspo.loss import LossOutput
from gspo.padded import padded_loss
from gspo.settings import Objective

Theirs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
F64 = torch.float64


def mean_over_tokens(values_SL: Tensor, mask_SL: Tensor) -> Tensor:
    return (values_SL * mask_SL).sum() / mask_SL.sum()


def vespo_of_its_authors(old_SL: Tensor, new_SL: Tensor, advantages_SL: Tensor, mask_SL: Tensor) -> Tensor:
    moved_SL = torch.clamp(new_SL - old_SL, -20.0, 20.0)
    w_S = torch.clamp(torch.sum(moved_SL * mask_SL, dim=-1), -20.0, 20.0).detach().exp()
    positive_S = (advantages_SL[:, 0] >= 0).to(F64)
    k_S, lam_S = positive_S * 2.0 + (1 - positive_S) * 3.0, positive_S * 3.0 + (1 - positive_S) * 2.0
    log_phi_S = lam_S + k_S * torch.log(w_S.clamp(min=1e-8)) - lam_S * w_S
    phi_S = torch.nan_to_num(torch.exp(log_phi_S), nan=0.0, posinf=0.0, neginf=0.0)
    return mean_over_tokens(-phi_S[:, None] * advantages_SL * new_SL, mask_SL)


def bounds_of_m2po(
    old_SL: Tensor, new_SL: Tensor, advantages_SL: Tensor, mask_SL: Tensor, budget: float
) -> tuple[float, float]:
    """The authors' bounds of the ratio before their floors; 0 and 100,000 where none is needed."""
    ratio_SL, squares_SL = torch.exp(new_SL - old_SL), (old_SL - new_SL).square()
    rising_SL = (advantages_SL[:, :1] > 1e-12) & (ratio_SL > 1.0 + 1e-12)
    falling_SL = (advantages_SL[:, :1] < -1e-12) & (ratio_SL < 1.0 - 1e-12)
    squares = sorted(squares_SL[(rising_SL | falling_SL) & mask_SL.bool()].tolist())
    if not squares or sum(squares) / len(squares) <= budget + 1e-12:
        return 0.0, 100_000.0
    target, so_far = budget * len(squares), 0.0
    for place, square in enumerate(squares):
        so_far += square
        if (square - 1e-12) * (len(squares) - place - 1) + so_far >= target - 1e-12:
            tau = 0.0 if place == 0 else (squares[place - 1] - 1e-12) ** 0.5
            return math.exp(-tau), math.exp(tau)
    raise AssertionError("the last token alone reaches the target")


def m2po_of_its_authors(budget: float = 0.04) -> Theirs:
    def loss(old_SL: Tensor, new_SL: Tensor, advantages_SL: Tensor, mask_SL: Tensor) -> Tensor:
        found = bounds_of_m2po(old_SL, new_SL.detach(), advantages_SL, mask_SL, budget)
        low, high = max(1 - found[0], 0.3), max(found[1] - 1, 0.5)
        ratio_SL = torch.exp(new_SL - old_SL)
        plain_SL, bounded_SL = -advantages_SL * ratio_SL, -advantages_SL * torch.clamp(ratio_SL, 1 - low, 1 + high)
        return mean_over_tokens(torch.maximum(plain_SL, bounded_SL), mask_SL)

    return loss


RIVALS: dict[str, tuple[Objective, Theirs, float]] = {
    "vespo": (Objective.vespo(), vespo_of_its_authors, 0.15),
    "m2po_clip": (Objective.m2po_clip(), m2po_of_its_authors(), 0.35),
    "m2po_clip within its floors": (Objective.m2po_clip(), m2po_of_its_authors(), 0.25),
    "m2po_clip without a clip": (Objective.m2po_clip(), m2po_of_its_authors(), 0.05),
    "m2po_clip, wide": (replace(Objective.m2po_clip(), m2po_bound=0.5), m2po_of_its_authors(0.5), 1.0),
}


def rows(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Up to eight answers of up to 30 tokens, some fully masked, with the same advantage at each token."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (int(torch.randint(1, 9, (), generator=drawn)), int(torch.randint(1, 31, (), generator=drawn)))
    old_SL = -3 * torch.rand(shape, generator=drawn, dtype=F64)
    shared_S1 = spread * torch.randn((shape[0], 1), generator=drawn, dtype=F64)
    new_SL = old_SL + shared_S1 + spread * torch.randn(shape, generator=drawn, dtype=F64)
    advantages_S1 = torch.randn((shape[0], 1), generator=drawn, dtype=F64)
    advantages_S1[torch.rand((shape[0], 1), generator=drawn) < 0.1] = 0.0
    mask_SL = torch.rand(shape, generator=drawn) < 0.8
    mask_SL[torch.rand(shape[0], generator=drawn) < 0.1] = False
    mask_SL[0, 0] = True
    return old_SL, new_SL, advantages_S1.expand(shape), mask_SL


def ours_of(objective: Objective, old_SL: Tensor, new_SL: Tensor, advantages_SL: Tensor, mask_SL: Tensor) -> LossOutput:
    size = mask_SL.shape[0]
    num_tokens = max(1, int(mask_SL.sum()))
    # Bounds have the precision of the lags.
    lag_S = torch.zeros(size, dtype=F64)
    return padded_loss(
        objective, new_SL, old_SL, advantages_SL, mask_SL, num_sequences=size, num_tokens=num_tokens, lag_S=lag_S
    )


@pytest.mark.parametrize("rival", RIVALS)
def test_loss_and_gradient_are_their_authors(rival: str) -> None:
    objective, theirs, spread = RIVALS[rival]
    taken = 0.0
    for seed in range(60):
        old_SL, new_SL, advantages_SL, mask_SL = rows(seed, spread)
        own_SL, their_SL = new_SL.clone().requires_grad_(), new_SL.clone().requires_grad_()
        output = ours_of(objective, old_SL, own_SL, advantages_SL, mask_SL)
        expected = theirs(old_SL, their_SL, advantages_SL, mask_SL.to(F64))
        output.loss.backward()
        expected.backward()
        assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-13), f"seed {seed}"
        torch.testing.assert_close(own_SL.grad, their_SL.grad, rtol=1e-12, atol=1e-14, msg=f"seed {seed}")
        taken += float((output.stats.clipped_high_S + output.stats.clipped_low_S).sum())
    assert (taken > 0) is ("without" not in rival)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("shift", [0.02, -0.02, 19.0, -19.0, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_product_of_ten_thousand_ratios_neither_overflows_nor_counts(
    dtype: torch.dtype, shift: float, advantage: float
) -> None:
    """W is e^200, e^-200, beyond all numbers, and 0: the kernel vanishes at both ends, and with it value and gradient."""
    old_SL = torch.full((1, 10_000), -20.0, dtype=dtype)
    new_SL = (old_SL + shift).requires_grad_()
    mask_SL = torch.ones_like(old_SL, dtype=torch.bool)
    output = ours_of(Objective.vespo(), old_SL, new_SL, torch.full_like(old_SL, advantage), mask_SL)
    output.loss.backward()
    assert new_SL.grad is not None
    assert float(new_SL.grad.abs().sum()) < 3e-15
    assert math.isfinite(output.loss.item())
    assert abs(output.loss.item()) < 3e-15 * abs(new_SL[0, 0].item())
    removed = output.stats.clipped_high_S if advantage > 0 else output.stats.clipped_low_S
    assert removed.item() == pytest.approx(1.0)


@pytest.mark.parametrize("objective", [Objective.vespo(), Objective.m2po_clip()], ids=lambda found: found.surrogate)
def test_a_log_prob_of_minus_infinity_is_refused_with_its_place_and_no_action_token_gives_zero(objective: Objective) -> None:
    old_SL = torch.full((2, 3), -1.0, dtype=F64)
    new_SL = old_SL.clone().requires_grad_()
    nothing_SL = torch.zeros_like(old_SL, dtype=torch.bool)
    output = ours_of(objective, old_SL, new_SL, torch.ones_like(old_SL), nothing_SL)
    output.loss.backward()
    assert new_SL.grad is not None
    assert output.loss.item() == float(new_SL.grad.abs().sum()) == 0.0
    broken_SL = old_SL.clone()
    broken_SL[1, 2] = -math.inf
    with pytest.raises(ValueError, match=r"\[(5|1, 2)\] is -inf"):
        ours_of(objective, old_SL, broken_SL, torch.ones_like(old_SL), ~nothing_SL)
