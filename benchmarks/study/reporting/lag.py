"""The tables of question m, its tuning, and its rule as it was fixed beforehand (benchmarks/study/questions/lag.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from benchmarks.markdown import table as markdown
from benchmarks.study.questions.lag import (
    ARMS,
    CALIBRATED,
    COLUMNS,
    CONSTANT,
    LAGS,
    LENGTHS,
    MOST_BEYOND,
    NEAR,
    NEVER,
    SEEDS,
    TUNING_SEEDS,
    Setting,
    Tuning,
    column_of,
    place_of,
    settings_of,
)
from benchmarks.study.reporting.summary import Interval, RunSummary, interval
from benchmarks.study.reporting.tables import signed
from benchmarks.study.results import Results

OCTAVE: Final = 1.0
NUM_RUNS: Final = len(ARMS) * len(COLUMNS) * len(LAGS) * len(SEEDS)
"""Of a length; some of them are one run, such as those that clip alike at lag 0."""


class Verdict(NamedTuple):
    """Of one length: "shown", "refuted" or "open" for each part of the rule."""

    costs_nothing: str
    shipped: str
    tuned: str


def next_tuning(results: Results, tuning: Tuning, lengths: Iterable[str] = LENGTHS) -> Tuning:
    """Return the tuning after the runs that it asked for: the best setting of each arm, or one more step beyond an edge.

    Raises: ValueError while a run of m-tune is missing.
    """
    chosen, beyond = dict(tuning.chosen), {place: list(found) for place, found in tuning.beyond.items()}
    for length in lengths:
        for arm in ARMS:
            place = place_of(length, arm)
            best = _best(results, length, arm, tuning)
            further = _beyond(length, arm, best, tuning)
            if further and len(beyond.get(place, ())) < MOST_BEYOND:
                beyond.setdefault(place, []).append(further[0])
            else:
                chosen[place] = best
    return Tuning(chosen, beyond)


def is_inside(length: str, arm: str, tuning: Tuning) -> bool:
    """Whether lower and higher rates than the chosen one were tried, and widths where the arm has one."""
    return not _beyond(length, arm, tuning.chosen[place_of(length, arm)], tuning)


def margin(results: Results, length: str, arm: str, column: str, seed: int) -> float:
    """Return log2 of the largest lag up to which the reward is near the ceiling's; 0: not at lag 2.

    Raises: KeyError for a run that is missing.
    """
    ceiling, sound = _area(results, length, CONSTANT, "tuned", 0, seed), 0.0
    for lag in LAGS:
        if _area(results, length, arm, column, lag, seed) < ceiling - NEAR:
            return sound
        sound = math.log2(lag) if lag else 0.0
    return sound


def missing(results: Results, length: str) -> int:
    """Return how many runs of a length's four seeds are not there."""
    return sum(
        seed not in results.at("m", place_of(length, arm), f"{column}, lag {lag}")
        for arm in ARMS
        for column in COLUMNS
        for lag in LAGS
        for seed in SEEDS
    )


def verdict(results: Results, length: str, tuning: Tuning | None = None) -> Verdict:
    """Apply the rule to a length. Raises: ValueError while a run of it is missing."""
    if left := missing(results, length):
        raise ValueError(f"{length}: {left} runs are missing, and the rule asks for four whole seeds")
    known = Tuning.read() if tuning is None else tuning
    if not is_inside(length, CONSTANT, known):
        return Verdict("open", "open", "open")
    cost = cost_of_two(results, length)
    first = "shown" if _low(cost) > -NEAR else "refuted" if _high(cost) < -NEAR else "open"
    inside = [arm for arm in ARMS if arm != CONSTANT and is_inside(length, arm, known)]
    others = [arm for arm in ARMS if arm != CALIBRATED]
    return Verdict(
        first,
        _no_further([less(results, length, CALIBRATED, arm, "shipped") for arm in others]),
        _no_further([less(results, length, CONSTANT, arm, "tuned") for arm in inside]),
    )


def missed_its_aim(results: Results, length: str) -> bool:
    """Whether a length tells nothing: the ceiling gains nothing in a seed, or no clip is as good as a constant one."""
    ceiling = results.at("m", place_of(length, CONSTANT), "tuned, lag 0").values()
    return any(run.final < run.evals[0][1] for run in ceiling) or _low(less(results, length, NEVER, CONSTANT, "tuned")) >= 0


def cost_of_two(results: Results, length: str) -> Interval:
    """Return the reward of constant, tuned, at lag 2 less the ceiling."""
    areas = [[_area(results, length, CONSTANT, "tuned", lag, seed) for seed in SEEDS] for lag in (2, 0)]
    return interval([late - without for late, without in zip(*areas, strict=True)])


def less(results: Results, length: str, arm: str, other: str, column: str) -> Interval:
    """Return the mean of the differences of two arms' margins, in octaves."""
    return interval(
        [margin(results, length, arm, column, seed) - margin(results, length, other, column, seed) for seed in SEEDS]
    )


def comparison(results: Results) -> str:
    """Both columns of each length, as soon as its four seeds are whole; until then only how many runs are missing."""
    parts = []
    for length in LENGTHS:
        if left := missing(results, length):
            parts.append(f"{length.capitalize()} answers: {left} runs are missing.")
            continue
        rows = []
        for arm in ARMS:
            row = [arm]
            for column, best in zip(COLUMNS, (CALIBRATED, CONSTANT), strict=True):
                margins = [margin(results, length, arm, column, seed) for seed in SEEDS]
                behind = "-" if arm == best else signed(less(results, length, arm, best, column))
                rewards = [_mean(results, length, arm, column, lag) for lag in LAGS]
                row += [f"{sum(margins) / len(margins):.2f}", behind, " ".join(f"{reward:.2f}" for reward in rewards)]
            rows.append(row)
        lags = ", ".join(map(str, LAGS))
        head = ["arm"]
        for column, best in zip(COLUMNS, (CALIBRATED, CONSTANT), strict=True):
            head += [f"margin, {column}", f"less *{best}*", f"reward at lag {lags}"]
        parts.append(f"{length.capitalize()} answers:\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def _best(results: Results, length: str, arm: str, tuning: Tuning) -> Setting:
    areas = {}
    for setting in settings_of(length, arm, tuning):
        found = results.at("m-tune", place_of(length, arm), column_of(setting))
        if len(found) < len(TUNING_SEEDS):
            raise ValueError(f"m-tune: {length}, {arm}, {column_of(setting)} has {len(found)} of {len(TUNING_SEEDS)} runs")
        areas[setting] = math.fsum(run.area for run in found.values()) / len(found)
    return max(areas, key=areas.__getitem__)


def _beyond(length: str, arm: str, best: Setting, tuning: Tuning) -> list[Setting]:
    """Return the settings one step beyond ``best`` on each side where nothing was tried."""
    tried, (rate, multiple) = settings_of(length, arm, tuning), best
    steps = [(rate / 2, multiple), (rate * 2, multiple)]
    if ARMS[arm].values:
        steps += [(rate, multiple / ARMS[arm].step), (rate, multiple * ARMS[arm].step)]
    rates, multiples = zip(*tried, strict=True)
    ends = [rate == min(rates), rate == max(rates), multiple == min(multiples), multiple == max(multiples)]
    return [step for step, is_end in zip(steps, ends, strict=False) if is_end]


def _no_further(differences: list[Interval]) -> str:
    if any(_high(each) < 0 for each in differences):
        return "refuted"
    return "shown" if all(_low(each) > -OCTAVE for each in differences) else "open"


def _low(found: Interval) -> float:
    return found.mean - found.half_width


def _high(found: Interval) -> float:
    return found.mean + found.half_width


def _mean(results: Results, length: str, arm: str, column: str, lag: int) -> float:
    return math.fsum(_area(results, length, arm, column, lag, seed) for seed in SEEDS) / len(SEEDS)


def _area(results: Results, length: str, arm: str, column: str, lag: int, seed: int) -> float:
    found: dict[int, RunSummary] = results.at("m", place_of(length, arm), f"{column}, lag {lag}")
    return found[seed].area
