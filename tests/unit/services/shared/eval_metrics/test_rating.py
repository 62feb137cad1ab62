"""Elo ratings of simulated solvers of known rating, and a second, slow computation."""

import math

import numpy as np
import pytest

from gspo_services.shared.eval_metrics import Attempts, elo_rating, win_probability


def simulated(rng: np.random.Generator, rating: float, num_problems: int, samples: int = 1) -> list[Attempts]:
    problems = rng.uniform(800, 2800, num_problems)
    return [
        Attempts(float(each), samples, int(rng.binomial(samples, win_probability(rating, float(each))))) for each in problems
    ]


def slow_rating(problems: list[Attempts]) -> tuple[float, float]:
    """The maximum of the log-likelihood on ever finer grids, and the error from its numerical curvature there."""

    def log_likelihood(rating: float) -> float:
        total = 0.0
        for each in problems:
            p = 1 / (1 + 10 ** ((each.rating - rating) / 400))
            total += each.num_solved * math.log(p) + (each.num_samples - each.num_solved) * math.log(1 - p)
        return total

    middle, step = 1800.0, 500.0
    while step > 1e-4:
        middle = max((middle + place * step for place in range(-10, 11)), key=log_likelihood)
        step /= 4
    h = 0.5
    curvature = (log_likelihood(middle + h) - 2 * log_likelihood(middle) + log_likelihood(middle - h)) / h**2
    return middle, 1 / math.sqrt(-curvature)


def test_the_rating_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(5)
    for truth in (900.0, 1500.0, 2400.0):
        problems = simulated(rng, truth, 60)
        value, error = slow_rating(problems)
        found = elo_rating(problems)
        assert found.kind == "estimated"
        assert found.value == pytest.approx(value, abs=0.01)
        assert (found.low, found.high) == (
            pytest.approx(value - 1.96 * error, abs=0.1),
            pytest.approx(value + 1.96 * error, abs=0.1),
        )


@pytest.mark.parametrize(("rating", "num_problems", "samples"), [(1200.0, 40, 1), (1900.0, 120, 1), (1900.0, 40, 8)])
def test_a_solver_of_known_rating_is_recovered_within_the_interval(rating: float, num_problems: int, samples: int) -> None:
    rng = np.random.default_rng(int(rating) + samples)
    inside, draws = 0, 300
    for _ in range(draws):
        found = elo_rating(simulated(rng, rating, num_problems, samples))
        inside += (found.low or -math.inf) <= rating <= (found.high or math.inf)
    # 0.95 within 3 standard errors of the count; with several samples the larger of two errors is taken.
    assert 0.912 <= inside / draws <= 0.99


def test_problems_harder_than_their_rating_says_widen_the_interval() -> None:
    # Each problem's true rating is 400 off: its eight samples come out alike.
    rng = np.random.default_rng(11)
    plain, noisy = [], []
    for each in rng.uniform(1000, 2600, 60):
        plain.append(Attempts(float(each), 8, int(rng.binomial(8, win_probability(1800, float(each))))))
        off = float(each) + (400 if rng.random() < 0.5 else -400)
        noisy.append(Attempts(float(each), 8, int(rng.binomial(8, win_probability(1800, off)))))
    one, other = elo_rating(plain), elo_rating(noisy)
    assert one.high is not None
    assert one.low is not None
    assert other.high is not None
    assert other.low is not None
    assert other.high - other.low > 1.5 * (one.high - one.low)


def test_everything_or_nothing_solved_is_named_and_has_one_bound() -> None:
    problems = [(1500.0, 1), (1800.0, 1), (2100.0, 2)]
    best = elo_rating([Attempts(rating, number, number) for rating, number in problems])
    worst = elo_rating([Attempts(rating, number, 0) for rating, number in problems])
    assert (best.kind, best.value, best.high) == ("all_solved", None, None)
    assert (worst.kind, worst.value, worst.low) == ("none_solved", None, None)
    assert best.low is not None
    assert worst.high is not None
    solving = math.prod(win_probability(best.low, rating) ** number for rating, number in problems)
    failing = math.prod((1 - win_probability(worst.high, rating)) ** number for rating, number in problems)
    assert (solving, failing) == (pytest.approx(0.025), pytest.approx(0.025))


def test_no_problem_and_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="no problem with a rating was tried"):
        elo_rating([])
    with pytest.raises(ValueError, match="expected a finite number"):
        elo_rating([Attempts(math.nan, 1, 1)])
    with pytest.raises(ValueError, match="3 of 2 samples"):
        elo_rating([Attempts(1500.0, 2, 3)])
