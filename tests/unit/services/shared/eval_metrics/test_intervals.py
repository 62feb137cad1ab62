"""Intervals of means over tasks contain the truth as often as they say."""

import math

import numpy as np
import pytest

from gspo_services.shared.eval_metrics import difference_interval, mean_interval, share_interval, t_quantile

DRAWS = 400


def coverage(num_tasks: int, k: int, a: float, b: float) -> float:
    """How often the interval holds the true mean: tasks whose chance of being solved is drawn from Beta(a, b)."""
    rng = np.random.default_rng(num_tasks * 100 + k)
    inside = 0
    for _ in range(DRAWS):
        shares = rng.binomial(k, rng.beta(a, b, num_tasks)) / k
        found = share_interval(shares.tolist(), num_tasks * k)
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= a / (a + b) <= found.high
    return inside / DRAWS


@pytest.mark.parametrize("k", [1, 8, 32])
@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2, 2), (20, 20)])
def test_the_interval_of_shares_covers_the_truth_for_k_samples_of_30_tasks(k: int, a: float, b: float) -> None:
    # 0.95 within 3.5 standard errors of the count; samples taken as independent would cover about half at (0.5, 0.5), 32.
    assert 0.91 <= coverage(30, k, a, b) <= 0.99


def test_one_sample_of_each_task_has_wilsons_own_interval() -> None:
    # Wilson (1927) for 8 of 20, as Newcombe (1998) and R's prop.test(correct = FALSE) compute it.
    found = share_interval([1.0] * 8 + [0.0] * 12, 20)
    assert found.value == pytest.approx(0.4)
    assert (found.low, found.high) == (pytest.approx(0.2188, abs=1e-4), pytest.approx(0.6134, abs=1e-4))


def test_an_interval_has_a_width_where_everything_or_nothing_was_solved() -> None:
    low, high = share_interval([1.0] * 30, 960), share_interval([0.0] * 30, 960)
    assert (low.high, low.low) == (1.0, pytest.approx(0.8865, abs=1e-4))
    assert (high.low, high.high) == (0.0, pytest.approx(0.1135, abs=1e-4))


def test_many_samples_of_one_task_say_nothing_about_others() -> None:
    found = share_interval([0.5], 1024)
    assert found.low is not None
    assert found.low < 0.1


def test_means_of_any_size_have_students_interval() -> None:
    found = mean_interval([1.0, 2.0, 6.0])
    half = 4.303 * math.sqrt(7 / 3)
    assert found == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    assert mean_interval([2.5]) == (2.5, None, None)
    assert (t_quantile(4), t_quantile(30), t_quantile(1000)) == (2.776, 2.042, 1.96)


def test_a_difference_over_the_same_tasks_is_surer_than_its_sides() -> None:
    before = [0.0, 0.25, 0.5, 0.75, 1.0]
    after = [0.1, 0.36, 0.6, 0.84, 1.1]
    found = difference_interval(before, after)
    assert found.low is not None
    assert found.low > 0.08
    with pytest.raises(ValueError, match="the same tasks"):
        difference_interval([1.0], [1.0, 2.0])


def test_shares_outside_their_range_and_no_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected values in \[0, 1\]"):
        share_interval([0.5, 1.5], 2)
    with pytest.raises(ValueError, match="no task has a sample"):
        share_interval([], 0)
