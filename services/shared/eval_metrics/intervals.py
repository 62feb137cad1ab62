"""95 % intervals of a mean over tasks, whose samples belong together."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
    2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 0.975 quantile of Student's t with 1, 2, ... degrees of freedom; 1.96 above."""
Z_975: Final = 1.959964


class Interval(NamedTuple):
    """A value and its 95 % interval; an unknown end is None."""

    value: float
    low: float | None
    high: float | None


def t_quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t."""
    return _T_975[degrees - 1] if degrees <= len(_T_975) else 1.96


def share_interval(values: Sequence[float], num_samples: int) -> Interval:
    """Return the mean of shares, one for each task and in [0, 1], with an interval for other tasks of the same kind.

    The tasks are the clusters (Miller 2024, arXiv 2411.00640, section 2.2): samples of one task are no independent evidence
    about other tasks. Wilson's score interval (1927), with the effective sample size in place of the sample size (Korn and
    Graubard 1998; Franco et al. 2019): n p (1 - p) / V, where V is the variance of the n tasks' shares. One sample for each
    task makes it Wilson's own. It stays within [0, 1] and has a width where all tasks came out alike. ``num_samples``: those
    of all tasks together, the largest effective size. Where V is smaller than that of single samples, the effective size is
    corrected for few tasks, by Student's t with n - 1 degrees of freedom. One task says nothing about others: its size is 1.

    Raises: ValueError without a task, or for a value outside [0, 1].
    """
    _require(values)
    if any(not 0 <= value <= 1 for value in values):
        raise ValueError(f"shares are {list(values)[:8]}: expected values in [0, 1]")
    num_tasks = len(values)
    share = math.fsum(values) / num_tasks
    variance = math.fsum((value - share) ** 2 for value in values) / num_tasks
    return Interval(share, *_wilson(share, _effective_size(share, variance, num_tasks, num_samples)))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of values of any size, one for each task: Student's t over the tasks. No interval for one task.

    Raises: ValueError without a task.
    """
    _require(values)
    num_tasks = len(values)
    mean = math.fsum(values) / num_tasks
    if num_tasks == 1:
        return Interval(mean, None, None)
    squares = math.fsum((value - mean) ** 2 for value in values)
    half = t_quantile(num_tasks - 1) * math.sqrt(squares / (num_tasks - 1) / num_tasks)
    return Interval(mean, mean - half, mean + half)


def difference_interval(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return how much higher ``after`` is, for the same tasks in the same order: the variation among tasks cancels (paired).

    Raises: ValueError for lists of different lengths, or empty ones.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} tasks: a paired difference needs the same tasks on both sides")
    return mean_interval([new - old for old, new in zip(before, after, strict=True)])


def change_interval(before: Interval, after: Interval, correlation: float = 0.0) -> Interval | None:
    """Return how much higher ``after`` is, from the intervals of both; None where an end of either is unknown.

    Zou and Donner 2008 (MOVER), which squares and adds the distances of the ends; of Wilson's intervals it is Newcombe's
    method 10 (1998), and has a width where all of 0 of n and 0 of n came out alike. ``correlation``: of the values of the
    same tasks, in [-1, 1]; 0 for other tasks, or where it is unknown.
    """
    if before.low is None or before.high is None or after.low is None or after.high is None:
        return None
    change = after.value - before.value
    down = _joined(after.value - after.low, before.high - before.value, correlation)
    up = _joined(after.high - after.value, before.value - before.low, correlation)
    return Interval(change, change - down, change + up)


def _joined(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))


def share_from(share: float, error: float, num_tasks: int) -> Interval:
    """Return what ``share_interval`` gives of tasks whose values are lost: from their mean, its standard error and their
    number. Where these cannot be of values in [0, 1] it is what ``mean_interval`` gives. ``error``: NaN of fewer than two.

    Raises: ValueError without a task.
    """
    if num_tasks < 1:
        raise ValueError(f"{num_tasks} tasks: there is nothing to take a mean of")
    variance = 0.0 if num_tasks == 1 or math.isnan(error) else error * error * (num_tasks - 1)
    most = share * (1 - share)
    if abs(variance - most) <= 1e-4 * most:
        variance = most  # Of 0 and 1 alone, and rounded.
    if not 0 <= share <= 1 or variance > most + 1e-12:
        half = t_quantile(max(1, num_tasks - 1)) * error
        return Interval(share, None, None) if math.isnan(half) else Interval(share, share - half, share + half)
    return Interval(share, *_wilson(share, _effective_size(share, variance, num_tasks, num_tasks)))


def _effective_size(share: float, variance: float, num_tasks: int, num_samples: int) -> float:
    """See ``share_interval``."""
    if not (num_tasks > 1 and 0 < share < 1 and variance < share * (1 - share) * (1 - 1e-9)):
        return float(num_tasks)
    most = float(max(num_tasks, num_samples))
    found = num_tasks * share * (1 - share) / variance if variance > 0 else most
    return float(min(most, found) * (Z_975 / t_quantile(num_tasks - 1)) ** 2)


def _wilson(share: float, size: float) -> tuple[float, float]:
    square = Z_975 * Z_975
    middle = (share + square / (2 * size)) / (1 + square / size)
    half = Z_975 / (1 + square / size) * math.sqrt(share * (1 - share) / size + square / (4 * size * size))
    # Rounding must not leave the share, or [0, 1], outside.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _require(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("no task has a sample: there is nothing to take a mean of")
