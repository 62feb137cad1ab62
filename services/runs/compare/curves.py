"""Curves of runs over batches, tokens and seconds, and their mean over seeds with an interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from gspo_services.runs.compare.runs import ComparedRun
from gspo_services.runs.metrics import column, known, mean, number, rolling
from gspo_services.shared.eval_metrics import mean_interval

Axis = Literal["batches", "tokens", "seconds"]
AXES: Final[tuple[Axis, ...]] = ("batches", "tokens", "seconds")
Floats = NDArray[np.float64]
_POINTS: Final = 200


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One measure of one group over one axis."""

    x: Floats
    mean: Floats
    """The mean over the group's runs, up to where all of them have come."""
    low: Floats
    high: Floats
    """95 % interval of the mean (Student's t over seeds); the curve itself if there is one run."""
    runs: tuple[tuple[Floats, Floats], ...]
    """x and y of each run, to its own end."""


def held_out(runs: Sequence[ComparedRun], axis: Axis) -> Curve:
    """Return the curve of the held-out reward (``eval/reward``)."""
    return _curve([_held_out(run, axis) for run in runs])


def training(runs: Sequence[ComparedRun], axis: Axis) -> Curve:
    """Return the curve of the training reward, as a rolling mean."""
    return _curve([_training(run, axis) for run in runs])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % interval (Student's t); NaN for the latter with fewer than two values."""
    some = known(values)
    if not some:
        return math.nan, math.nan
    found = mean_interval(some)
    return found.value, math.nan if found.high is None else found.high - found.value


def _held_out(run: ComparedRun, axis: Axis) -> tuple[Floats, Floats]:
    position = positions(run, axis)
    found = []
    for each in run.metrics.evaluations:
        x = each.time_s if axis == "seconds" else position.get(each.batch, math.nan)
        found.append((x, each.reward))
    return _sorted(found)


def _training(run: ComparedRun, axis: Axis) -> tuple[Floats, Floats]:
    position = positions(run, axis)
    found = [(position.get(int(row["batch"]) + 1, math.nan), number(row, "train/reward")) for row in run.metrics.batches]
    x, y = _sorted(found)
    return x, np.array(rolling(y.tolist(), mean), np.float64)


def positions(run: ComparedRun, axis: Axis) -> dict[int, float]:
    """The place on ``axis`` of the weights after so many batches. Tokens are those trained on; batches that are missing in
    the record count none."""
    rows = run.metrics.batches
    after = [int(row["batch"]) + 1 for row in rows]
    if axis == "batches":
        first = {each.batch: float(each.batch) for each in run.metrics.evaluations}
        return first | {index: float(index) for index in after}
    if axis == "tokens":
        totals = accumulate(0.0 if math.isnan(value) else value for value in column(rows, "num_tokens"))
        return {0: 0.0, **dict(zip(after, totals, strict=True))}
    return dict(zip(after, column(rows, "time_s"), strict=True))


def _sorted(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    """Return the points with both numbers, each x once (the last y), in order."""
    known = {x: y for x, y in points if math.isfinite(x) and math.isfinite(y)}
    order = sorted(known)
    return np.array(order, np.float64), np.array([known[x] for x in order], np.float64)


def _curve(runs: Sequence[tuple[Floats, Floats]]) -> Curve:
    """Average over the part of the axis that all runs have, with straight lines between their points."""
    some = [(x, y) for x, y in runs if len(x)]
    nothing = np.zeros(0)
    if not some or len(some) < len(runs):
        return Curve(x=nothing, mean=nothing, low=nothing, high=nothing, runs=tuple(some))
    if len(some) == 1:
        x, y = some[0]
        return Curve(x=x, mean=y, low=y, high=y, runs=tuple(some))
    begin, end = max(x[0] for x, _ in some), min(x[-1] for x, _ in some)
    grid = _grid([x for x, _ in some], begin, end)
    values = np.stack([np.interp(grid, x, y) for x, y in some], axis=1)
    found = [mean_interval(row) for row in values.tolist()]
    middle, low, high = np.array(found, np.float64).reshape(-1, 3).T
    return Curve(x=grid, mean=middle, low=low, high=high, runs=tuple(some))


def _grid(axes: Sequence[Floats], begin: float, end: float) -> Floats:
    """Return the runs' own points if they share them (batches), otherwise evenly spaced ones."""
    if begin > end:
        return np.zeros(0)
    shared = axes[0]
    for other in axes[1:]:
        shared = np.intersect1d(shared, other)
    own = shared[(shared >= begin) & (shared <= end)]
    fewest = min(int(((x >= begin) & (x <= end)).sum()) for x in axes)
    return own if len(own) >= max(2, fewest) else np.linspace(begin, end, _POINTS if end > begin else 1)
