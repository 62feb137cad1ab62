"""The table of question i, and its rule as it was fixed beforehand (benchmarks/study/questions/default.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from benchmarks.markdown import table as markdown
from benchmarks.study.questions.default import (
    ARMS,
    CALIBRATED,
    LEAST_SEEDS,
    NEVER,
    SEEDS,
    SETTINGS,
    TUNING_SEEDS,
    column_of,
    settings_of,
)
from benchmarks.study.reporting.summary import Interval, RunSummary, interval
from benchmarks.study.reporting.tables import collapsed, signed
from benchmarks.study.results import Results

QUESTION: Final = "i"
COLUMNS: Final = ("tuned", "shipped")
AS_CHEAP: Final = 1.1
_T_OF_SIX: Final = (2.984, 2.963, 2.944, 2.927, 2.912, 2.899, 2.886, 2.875, 2.865, 2.856)
"""Student's t at 1 - 0.05 / 12, for 17 .. 26 degrees of freedom (the distribution function inverted numerically)."""


def whole_seeds(results: Results) -> list[int]:
    """Return the seeds that have every run of the question."""
    needed = [(arm, column) for arm in ARMS for column in _columns(arm)]
    return [seed for seed in SEEDS if all(seed in results.at(QUESTION, *place) for place in needed)]


def verdict(results: Results) -> str:
    """Apply the rule: the arm that is to be the default; "open" where the regime needs no clip.

    Raises: ValueError while there are fewer whole seeds than the rule asks for.
    """
    seeds = whole_seeds(results)
    if len(seeds) < LEAST_SEEDS:
        raise ValueError(f"{len(seeds)} whole seeds: the rule asks for {len(SEEDS)}, and for at least {LEAST_SEEDS}")
    left = list(SETTINGS)
    for column in COLUMNS:
        best = max(left, key=lambda arm: _mean(_areas(results, arm, column, seeds)))
        left = [arm for arm in left if not _behind(of_six(results, arm, best, column, seeds))]
    seconds = {arm: _mean([_learner_seconds(run) for run in _runs(results, arm, "tuned", seeds)]) for arm in left}
    cheapest = [arm for arm in left if seconds[arm] <= AS_CHEAP * min(seconds.values())]
    winner = min(cheapest, key=lambda arm: SETTINGS[arm])
    clipped = zip(_areas(results, NEVER, "tuned", seeds), _areas(results, winner, "tuned", seeds), strict=True)
    return winner if _behind(interval([never - other for never, other in clipped])) else "open"


def of_six(results: Results, arm: str, other: str, column: str, seeds: Sequence[int]) -> Interval:
    """Return the mean of ``arm`` less ``other``, with the interval that allows for six pairs."""
    pairs = zip(_areas(results, arm, column, seeds), _areas(results, other, column, seeds), strict=True)
    differences = [own - theirs for own, theirs in pairs]
    mean, num = _mean(differences), len(differences)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in differences) / (num - 1))
    return Interval(mean, _T_OF_SIX[num - LEAST_SEEDS] * deviation / math.sqrt(num), num)


def best_settings(results: Results) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return what tuning chooses, by arm: rate and multiple of eps, and the rate at the shipped eps.

    Raises: ValueError while a run of i-tune is missing.
    """
    tuned, shipped = {}, {}
    for arm in ARMS:
        areas = {}
        for setting in settings_of(arm):
            found = results.at("i-tune", arm, column_of(*setting))
            if len(found) < len(TUNING_SEEDS):
                raise ValueError(f"i-tune: {arm}, {column_of(*setting)} has {len(found)} of {len(TUNING_SEEDS)} runs")
            areas[setting] = _mean([run.area for run in found.values()])
        tuned[arm] = max(areas, key=areas.__getitem__)
        if arm in SETTINGS:
            shipped[arm] = max((rate for rate, multiple in areas if multiple == 1), key=lambda rate: areas[rate, 1.0])
    return tuned, shipped


def comparison(results: Results) -> str:
    """One row per arm, over the whole seeds; until there are enough, only how many there are."""
    seeds = whole_seeds(results)
    if len(seeds) < LEAST_SEEDS:
        return f"{len(seeds)} of {len(SEEDS)} seeds; figures from {LEAST_SEEDS} on."
    measured = [f"{column}{what}" for column in COLUMNS for what in ("", f", less *{CALIBRATED}*", ", collapsed")]
    rows = []
    for arm in ARMS:
        row = [arm, str(len(seeds))]
        for column in COLUMNS:
            if column not in _columns(arm):
                row += ["-", "-", "-"]
                continue
            found = _runs(results, arm, column, seeds)
            less = "-" if arm == CALIBRATED else signed(of_six(results, arm, CALIBRATED, column, seeds))
            row += [interval([run.area for run in found]).text(3), less, collapsed(found)]
        seconds = _mean([_learner_seconds(run) for run in _runs(results, arm, "tuned", seeds)])
        rows.append([*row, f"{seconds:.1f}"])
    return markdown(["arm", "n", *measured, "learner's CPU s"], rows)


def _columns(arm: str) -> tuple[str, ...]:
    """An arm that never clips has no eps."""
    return COLUMNS if arm in SETTINGS else COLUMNS[:1]


def _behind(difference: Interval) -> bool:
    return difference.mean + difference.half_width < 0


def _runs(results: Results, arm: str, column: str, seeds: Sequence[int]) -> list[RunSummary]:
    found = results.at(QUESTION, arm, column)
    return [found[seed] for seed in seeds]


def _areas(results: Results, arm: str, column: str, seeds: Sequence[int]) -> list[float]:
    return [run.area for run in _runs(results, arm, column, seeds)]


def _learner_seconds(run: RunSummary) -> float:
    return run.sums["cpu_train_s"] + run.sums["cpu_reference_s"]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
