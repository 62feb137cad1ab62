"""The distance from a reference model: its estimators, and what an objective with one needs and refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from gspo.options.penalties import kl_estimates, sequence_kl
from gspo.settings import KlEstimator, Objective
from tests.support.loss.option_cases import Case, fast_loss, random_case
from tests.support.loss.oracle import oracle_sequence_kl

MASK = torch.tensor([True, True, False])
LOGPROBS = torch.tensor([-1.0, -2.0, math.nan], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -1.7, math.nan], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "expected", "slopes"),
    [
        ("k1", [0.5, -0.3], [1.0, 1.0]),
        ("k2", [0.125, 0.045], [0.5, -0.3]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.3) - 1.3], [1 - math.exp(-0.5), 1 - math.exp(0.3)]),
    ],
)
def test_the_estimators_are_schulmans_with_their_own_gradients(
    estimator: KlEstimator, expected: list[float], slopes: list[float]
) -> None:
    logprobs_T = LOGPROBS.clone().requires_grad_()
    kl_T = kl_estimates(logprobs_T, REFERENCE, MASK, estimator, clamp=10.0)
    assert kl_T.tolist() == pytest.approx([*expected, 0.0], abs=1e-15)
    (gradient_T,) = torch.autograd.grad(kl_T.sum(), logprobs_T)
    assert gradient_T.tolist() == pytest.approx([*slopes, 0.0], abs=1e-15)


def test_the_average_of_k2s_gradient_is_that_of_the_kl_and_k1s_is_zero() -> None:
    """Over all outcomes of a small distribution, so that no sampling noise is in the way."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 1.0], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    every = torch.ones(4, dtype=torch.bool)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)

    def average_gradient(estimator: KlEstimator) -> torch.Tensor:
        k = kl_estimates(logp, reference, every, estimator, clamp=10.0)
        (gradient,) = torch.autograd.grad((logp.exp().detach() * k).sum(), logits, retain_graph=True)
        return gradient

    torch.testing.assert_close(average_gradient("k2"), exact, rtol=0.0, atol=1e-15)
    assert average_gradient("k1").abs().max() < 1e-15
    assert (average_gradient("k3") - exact).abs().max() > 0.01


def test_a_distance_beyond_the_clamp_is_clamped_and_keeps_its_gradient() -> None:
    logprobs_T = torch.tensor([-40.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference_T = torch.tensor([0.0, -40.0], dtype=torch.float64)
    kl_T = kl_estimates(logprobs_T, reference_T, torch.ones(2, dtype=torch.bool), "k3", clamp=2.0)
    assert kl_T.tolist() == pytest.approx([math.exp(2) - 3, math.exp(-2) + 1], abs=1e-14)
    (gradient_T,) = torch.autograd.grad(kl_T.sum(), logprobs_T)
    assert gradient_T.tolist() == pytest.approx([1 - math.exp(2), 1 - math.exp(-2)], abs=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_is_taken_from_a_reward_is_the_oracles(estimator: KlEstimator) -> None:
    objective = Objective(kl_coefficient=0.3, kl_in="reward", kl_estimator=estimator, log_ratio_clamp=0.5)
    for seed in range(20):
        case: Case = random_case(Random(seed), objective, episodes=False)
        tokens = [
            (p, r, m, i)
            for i, s in enumerate(case.sequences)
            for p, r, m in zip(s.logprobs, s.reference, s.mask, strict=True)
        ]
        logprobs, reference, mask, ids = (list(column) for column in zip(*tokens, strict=True))
        kl_S = sequence_kl(
            objective,
            torch.tensor(logprobs, dtype=torch.float64),
            torch.tensor(reference, dtype=torch.float64),
            torch.tensor(mask),
            torch.tensor(ids),
            len(case.sequences),
        )
        assert kl_S.tolist() == pytest.approx([oracle_sequence_kl(objective, s) for s in case.sequences], abs=1e-12)


def test_reference_logprobs_that_are_missing_unused_or_not_finite_are_named_with_the_way_out() -> None:
    plain, with_kl = Objective(), Objective(kl_coefficient=0.1)
    case = random_case(Random(1), plain, episodes=False)
    parts = [list(range(len(case.sequences)))]
    num_tokens = sum(len(s.mask) for s in case.sequences)
    reference_T = torch.zeros(num_tokens, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^reference_logprobs_T is missing .* or set kl_coefficient = 0"):
        fast_loss(with_kl, case, parts, reference_logprobs_T=None)
    in_reward = replace(with_kl, kl_in="reward")
    for objective in (plain, in_reward):
        with pytest.raises(ValueError, match=r"^reference_logprobs_T is given, .* leave it out"):
            fast_loss(objective, case, parts, reference_logprobs_T=reference_T)
    first = case.sequences[0].actions[0] if case.sequences[0].actions else None
    assert first is not None
    reference_T[first] = math.nan
    with pytest.raises(ValueError, match=rf"^reference_logprobs_T\[{first}\] is nan; give finite numbers"):
        fast_loss(with_kl, case, parts, reference_logprobs_T=reference_T)


def test_an_entropy_that_is_missing_or_carries_no_gradient_is_named_with_the_way_out() -> None:
    objective = Objective(entropy_coefficient=0.1)
    case = random_case(Random(1), objective, episodes=False)
    parts = [list(range(len(case.sequences)))]
    with pytest.raises(ValueError, match=r"^entropy_T is missing .* or set entropy_coefficient = 0"):
        fast_loss(objective, case, parts, entropy_T=None)
    entropy_T = torch.ones(sum(len(s.mask) for s in case.sequences))
    with pytest.raises(ValueError, match=r"^entropy_T carries no gradient .*entropy_gradient=True"):
        fast_loss(objective, case, parts, entropy_T=entropy_T)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entropy_coefficient": -0.1}, r"entropy_coefficient is -0.1; give a finite number in \[0"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "kl_estimator is 'k1' with kl_in 'loss': its gradient is 0.*= 'k2'"),
        ({"kl_coefficient": -0.1}, r"kl_coefficient is -0.1; give a finite number in \[0"),
        ({"kl_estimator": "k4"}, "choose one of k1, k2, k3"),
        ({"kl_in": "advantage"}, "choose one of loss, reward"),
    ],
)
def test_a_kl_that_cannot_be_meant_is_refused_with_the_way_out(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**fields)  # type: ignore[arg-type]
