"""A comparison: groups of runs, their settings, one line of measures for each, and their curves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from gspo_services.runs.compare.curves import AXES, Axis, Curve, held_out, interval, positions, training
from gspo_services.runs.compare.runs import ComparedRun, SeedGroup, by_seed, differing, open_compared
from gspo_services.runs.metrics import HeldOut, best_evaluation, column, known, or_none
from gspo_services.shared.runtime.errors import ConfigurationError

LAST_BATCHES: Final = 10


@dataclass(frozen=True, kw_only=True)
class GroupMeasure:
    """One measure of a group: its mean over runs, and half of the 95 % interval; NaN if there is none."""

    mean: float
    half: float
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, compared."""

    groups: tuple[SeedGroup, ...]
    differences: dict[tuple[str, str], list[str]]
    """Settings that differ, by section and key: each group's value."""
    measures: dict[str, list[GroupMeasure]]
    """By name, one for each group."""
    target: float
    """The held-out reward that every run has reached, to which the "to reach" measures refer. NaN if there is none."""

    def curve(self, group: SeedGroup, measure: str, axis: Axis) -> Curve:
        """Return a curve. ``measure``: held_out or training."""
        return held_out(group.runs, axis) if measure == "held_out" else training(group.runs, axis)

    @property
    def notes(self) -> list[str]:
        return [note for group in self.groups for run in group.runs for note in run.notes]


def compare_runs(directories: Sequence[Path]) -> Comparison:
    """Read and compare runs. Raises: ConfigurationError for fewer than two, one named twice, and one without metrics."""
    known: dict[Path, Path] = {}
    for directory in directories:
        if (other := known.setdefault(directory.resolve(), directory)) is not directory:
            raise ConfigurationError(f"{directory} and {other} are the same run: name each once")
    if len(known) < 2:
        raise ConfigurationError("one run cannot be compared: name at least two")
    groups = by_seed([open_compared(directory) for directory in directories])
    runs = [run for group in groups for run in group.runs]
    target = _target(runs)
    found = {**_measures(target), **_of_sets(runs)}
    measures = {name: [_measured(group, of) for group in groups] for name, of in found.items()}
    return Comparison(groups=tuple(groups), differences=differing(groups), measures=measures, target=target)


def _measures(target: float) -> dict[str, Callable[[ComparedRun], float]]:
    def mean_of(key: str) -> Callable[[ComparedRun], float]:
        return lambda run: interval(column(run.metrics.batches, key))[0]

    found: dict[str, Callable[[ComparedRun], float]] = {
        "best held-out reward": _best_reward,
        "last held-out reward": lambda run: run.metrics.evaluations[-1].reward if run.metrics.evaluations else math.nan,
        f"training reward, last {LAST_BATCHES} batches": lambda run: interval(
            column(run.metrics.batches[-LAST_BATCHES:], "train/reward")
        )[0],
        "batches trained": lambda run: float(run.num_trained),
        "tokens trained on": lambda run: sum(known(column(run.metrics.batches, "num_tokens"))),
        "seconds": lambda run: max(known(column(run.metrics.batches, "time_s")), default=math.nan),
        "tokens/s, mean over batches": mean_of("tokens_per_s"),
        "lag (versions)": mean_of("lag/mean"),
        "clip fraction": mean_of("clip_fraction/all"),
        "entropy (nats/token)": mean_of("entropy/all"),
    }
    if not math.isnan(target):
        for axis in AXES:
            found[f"{axis} to a held-out reward of {target:.4g}"] = partial(_reached, axis=axis, target=target)
    return found


def _of_sets(runs: Sequence[ComparedRun]) -> dict[str, Callable[[ComparedRun], float]]:
    """Return the last value of each metric of each named set that any run has."""

    def last_of(name: str, metric: str) -> Callable[[ComparedRun], float]:
        def last(run: ComparedRun) -> float:
            values = [each.metrics[metric][0] for each in run.metrics.sets if each.name == name and metric in each.metrics]
            return values[-1] if values else math.nan

        return last

    pairs = dict.fromkeys((each.name, metric) for run in runs for each in run.metrics.sets for metric in each.metrics)
    return {f"last {name}/{metric}": last_of(name, metric) for name, metric in pairs}


def _measured(group: SeedGroup, of: Callable[[ComparedRun], float]) -> GroupMeasure:
    values = tuple(of(run) for run in group.runs)
    mean, half = interval(values)
    return GroupMeasure(mean=mean, half=half, values=values)


def _best_reward(run: ComparedRun) -> float:
    best = best_evaluation(run.metrics.evaluations, _reward)
    return math.nan if best is None else best.reward


def _reward(evaluation: HeldOut) -> float:
    return evaluation.reward


def _target(runs: Sequence[ComparedRun]) -> float:
    """Return the lowest of the runs' best evaluations: every run has reached it."""
    best = [_best_reward(run) for run in runs]
    return math.nan if any(math.isnan(value) for value in best) else min(best, default=math.nan)


def _reached(run: ComparedRun, axis: Axis, target: float) -> float:
    first = next((each for each in run.metrics.evaluations if each.reward >= target), None)
    if first is None:
        return math.nan
    return first.time_s if axis == "seconds" else positions(run, axis).get(first.batch, math.nan)


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """Return everything as JSON values; null where there is no number."""
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [
                    {
                        "directory": str(run.directory),
                        "state": run.state,
                        "seed": run.seed,
                        "batches_trained": run.num_trained,
                        "batches_wanted": run.num_batches,
                        "damaged_lines": run.metrics.num_damaged,
                    }
                    for run in group.runs
                ],
                "measures": {
                    name: {"mean": or_none(found[place].mean), "half_interval": or_none(found[place].half),
                           "values": [or_none(value) for value in found[place].values]}
                    for name, found in comparison.measures.items()
                },
                "curves": {
                    measure: {axis: _plain_curve(comparison.curve(group, measure, axis)) for axis in AXES}
                    for measure in ("held_out", "training")
                },
            }
            for place, group in enumerate(comparison.groups)
        ],
        "differences": {
            f"{section}.{key}": dict(zip([group.name for group in comparison.groups], values, strict=True))
            for (section, key), values in comparison.differences.items()
        },
        "notes": comparison.notes,
    }  # fmt: skip


def _plain_curve(curve: Curve) -> dict[str, Any]:
    return {
        "x": curve.x.tolist(),
        "mean": curve.mean.tolist(),
        "low": curve.low.tolist(),
        "high": curve.high.tolist(),
        "runs": [{"x": x.tolist(), "y": y.tolist()} for x, y in curve.runs],
    }
