"""The enumerable policy of the study: every answer once, exact gradients, clipped shares that are what was asked for."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.study.exact.gradient import MAX_LAG, STEPS, Arm, arm_gradient, arms, at_share, make_scene
from benchmarks.study.exact.policy import (
    LENGTH,
    NUM_PROMPTS,
    NUM_TOKENS,
    all_answers,
    probabilities,
    rewards,
    standard_advantages,
    start_table,
    token_logprobs,
    true_gradient,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Its matrices are small: beside other work several threads wait for each other, and it takes minutes."""
    torch.set_num_threads(1)


def test_the_probabilities_of_all_answers_add_up_to_one() -> None:
    answers = all_answers()
    words = NUM_TOKENS - 1
    assert answers.tokens_YL.shape[0] == sum(words**length for length in range(LENGTH + 1))
    torch.testing.assert_close(probabilities(start_table(0), answers).sum(dim=1), torch.ones(NUM_PROMPTS).double())


def test_the_true_gradient_is_that_of_the_expected_length_normalised_advantage() -> None:
    """By finite differences of sum_y sg[pi A / n] log pi."""
    answers, table = all_answers(), start_table(1)
    rewards_PY = rewards(answers, 1)
    pi_PY = probabilities(table, answers)
    weight_PY = pi_PY * standard_advantages(pi_PY, rewards_PY) / answers.num_tokens_Y
    moved = table.clone()
    place = (2, 1, 3, 1)
    moved[place] += 1e-6
    change = token_logprobs(moved, answers).sum(dim=2) - token_logprobs(table, answers).sum(dim=2)
    slope = float((weight_PY * change).sum() / NUM_PROMPTS / 1e-6)
    assert true_gradient(table, answers, rewards_PY).reshape(table.shape)[place].item() == pytest.approx(slope, rel=1e-4)


def test_without_lag_noise_and_clipping_every_arms_gradient_is_the_true_one() -> None:
    scene = make_scene(0, step=0.0, step_noise=0.0, engine_noise=0.0)
    expected = true_gradient(scene.learner_K[0], scene.answers, scene.rewards_PY)
    for name, arm in arms(scene).items():
        found, shares = arm_gradient(scene, arm, 0, math.inf)
        torch.testing.assert_close(found, expected, msg=name)
        assert shares.tolist() == [0.0] * (MAX_LAG + 1)


def test_arms_are_compared_at_the_share_that_was_asked_for() -> None:
    scene = make_scene(0, step=0.2, step_noise=2.0, engine_noise=0.01)
    for arm in (Arm(), replace(Arm(), z=0.2, recentre=True)):
        _, shares = at_share(scene, arm, STEPS - 1, 0.2)
        assert float(shares.mean()) == pytest.approx(0.2, abs=0.01)
