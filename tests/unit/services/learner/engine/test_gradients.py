"""What is looked for in gradients, and how those of one rank alone are clipped."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gspo_services.learner.engine.gradients import GradientWatch, NonFiniteGradientError, WholeGradients

CPU = torch.device("cpu")


def parameters(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(str(size), nn.Parameter(torch.ones(size))) for size in sizes]


def whole(pairs: list[tuple[str, nn.Parameter]]) -> WholeGradients:
    """In two groups, as routers with a rate of their own make them."""
    parameters = [parameter for _, parameter in pairs]
    return WholeGradients(pairs, [{"params": parameters[:1]}, {"params": parameters[1:]}])


@pytest.mark.parametrize("kind", [GradientWatch, whole])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_one_bad_element_in_one_of_several_micro_batches_is_found(
    kind: Callable[..., GradientWatch | WholeGradients], bad: float, place: int
) -> None:
    pairs = parameters(3, 100)
    watch = kind(pairs)
    for micro_batch in range(3):
        factors = torch.ones(100)
        factors[place] = bad if micro_batch == 1 else 1.0
        (pairs[1][1] * factors).sum().backward()
    received, non_finite = watch.take(CPU).tolist()
    assert received == [0.0, 1.0]
    assert non_finite == [0.0, 1.0]


@pytest.mark.parametrize("kind", [GradientWatch, whole])
def test_the_largest_gradients_that_can_be_clipped_are_finite(kind: Callable[..., GradientWatch | WholeGradients]) -> None:
    pairs = parameters(4)
    watch = kind(pairs)
    (pairs[0][1] * 9e18).sum().backward()
    assert watch.take(CPU).tolist() == [[1.0], [0.0]]


def test_a_frozen_parameter_has_no_gradient_and_gets_none() -> None:
    pairs = parameters(3, 5)
    pairs[0][1].requires_grad_(False)
    gradients = whole(pairs)
    (pairs[1][1] * 2).sum().backward()
    assert gradients.take(CPU).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert pairs[0][1].grad is None


def test_gradients_are_scaled_down_to_the_norm_and_never_up() -> None:
    pairs = parameters(1, 2)
    gradients = whole(pairs)
    for max_norm, expected in ((0.0, 5.0), (6.0, 5.0), (0.5, 0.5)):
        pairs[0][1].grad, pairs[1][1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
        gradients.take(CPU)
        assert gradients.clip(max_norm) == 5.0
        after = torch.cat([parameter.grad for _, parameter in pairs if parameter.grad is not None]).norm()
        assert float(after) == pytest.approx(expected, rel=1e-6)


def test_a_parameter_without_a_gradient_gets_zeros_so_that_its_moments_decay() -> None:
    pairs = parameters(1, 2)
    gradients = whole(pairs)
    pairs[0][1].grad = torch.tensor([3.0])
    assert gradients.take(CPU).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert pairs[1][1].grad is not None
    assert pairs[1][1].grad.tolist() == [0.0, 0.0]


def test_a_norm_above_float32_is_refused_before_anything_is_scaled() -> None:
    pairs = parameters(2)
    gradients = whole(pairs)
    pairs[0][1].grad = torch.tensor([3e38, 3e38])
    assert gradients.take(CPU).tolist() == [[1.0], [0.0]]
    with pytest.raises(NonFiniteGradientError, match="the gradient norm is inf; no step was made"):
        gradients.clip(1.0)
    assert pairs[0][1].grad.tolist() == torch.tensor([3e38, 3e38]).tolist()
