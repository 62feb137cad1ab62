"""An Elo rating from problems of known rating that were solved or not."""

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

from gspo_services.shared.eval_metrics.intervals import Z_975

_SCALE: Final = math.log(10) / 400
"""Elo (1978): 400 points are odds of 10 to 1."""
_TAIL: Final = 0.025
_WIDEST: Final = 10_000.0
"""Points beyond the easiest and the hardest problem in which a rating is looked for."""


class Attempts(NamedTuple):
    """The attempts at one problem."""

    rating: float
    num_samples: int
    num_solved: int


class Rating(NamedTuple):
    """The rating with its 95 % interval."""

    value: float | None
    """None if every attempt was solved, or none was: the likelihood has no maximum."""
    low: float | None
    """None: no lower bound, since nothing was solved."""
    high: float | None
    """None: no upper bound, since everything was solved."""
    kind: Literal["estimated", "all_solved", "none_solved"]


def win_probability(rating: float, problem: float) -> float:
    """Return the probability that a solver of ``rating`` solves a problem: 1 / (1 + 10^((problem - rating) / 400))."""
    exponent = _SCALE * (problem - rating)
    # Both forms, so that neither exponential overflows.
    return 1 / (1 + math.exp(exponent)) if exponent < 0 else math.exp(-exponent) / (1 + math.exp(-exponent))


def elo_rating(problems: Sequence[Attempts]) -> Rating:
    """Return the maximum-likelihood rating R of a solver, each attempt being a game against its problem.

    It is where the expected number of solved attempts is the number that was solved: sum n_i p_i(R) = sum c_i. The interval
    is R +- 1.96 / sqrt(I), with Fisher's information I = s^2 sum n_i p_i (1 - p_i), s = ln(10) / 400. Several samples of a
    problem are alike beyond its rating; so its own deviation c_i - n_i p_i counts once for each problem in a cluster-robust
    variance (Liang and Zeger 1986), sum (s (c_i - n_i p_i))^2 / I^2, and the larger of both variances is taken. Where all
    attempts were solved, the interval begins at the rating for which that has a probability of 2.5 %, and has no end; where
    none was, likewise from the other side.

    Raises: ValueError without an attempt, and for numbers that are none of attempts.
    """
    for problem in problems:
        if not math.isfinite(problem.rating):
            raise ValueError(f"a problem's rating is {problem.rating}: expected a finite number")
        if problem.num_samples < 1 or not 0 <= problem.num_solved <= problem.num_samples:
            raise ValueError(f"{problem.num_solved} of {problem.num_samples} samples of a problem are solved: no such count")
    if not problems:
        raise ValueError("no problem with a rating was tried: an Elo rating needs at least one")
    solved, tried = sum(each.num_solved for each in problems), sum(each.num_samples for each in problems)
    if solved == tried:
        return Rating(None, _edge(problems, solved=True), None, "all_solved")
    if not solved:
        return Rating(None, None, _edge(problems, solved=False), "none_solved")
    value = _root(problems, lambda rating: expected_solved(problems, rating) - solved)
    information = variance = 0.0
    for each in problems:
        p = win_probability(value, each.rating)
        information += _SCALE**2 * each.num_samples * p * (1 - p)
        variance += (_SCALE * (each.num_solved - each.num_samples * p)) ** 2
    error = 1 / math.sqrt(information)
    if tried > len(problems):
        error = max(error, math.sqrt(variance) / information)
    return Rating(value, value - Z_975 * error, value + Z_975 * error, "estimated")


def expected_solved(problems: Sequence[Attempts], rating: float) -> float:
    """Return the number of attempts that a solver of ``rating`` solves on average."""
    return math.fsum(each.num_samples * win_probability(rating, each.rating) for each in problems)


def _edge(problems: Sequence[Attempts], *, solved: bool) -> float:
    """Return the rating at which solving all attempts, or none, has a probability of 2.5 %."""

    def excess(rating: float) -> float:
        signed = ((rating, each.rating) if solved else (each.rating, rating) for each in problems)
        chances = zip(signed, problems, strict=True)
        log_chance = math.fsum(each.num_samples * _log_probability(*pair) for pair, each in chances)
        return log_chance - math.log(_TAIL) if solved else math.log(_TAIL) - log_chance

    return _root(problems, excess)


def _log_probability(rating: float, problem: float) -> float:
    exponent = _SCALE * (problem - rating)
    return -math.log1p(math.exp(exponent)) if exponent < 0 else -exponent - math.log1p(math.exp(-exponent))


def _root(problems: Sequence[Attempts], rising: Callable[[float], float]) -> float:
    """Find where a rising function of the rating is 0, by halving: it cannot diverge, and 55 steps leave no error."""
    low = min(each.rating for each in problems) - _WIDEST
    high = max(each.rating for each in problems) + _WIDEST
    for _ in range(55):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
