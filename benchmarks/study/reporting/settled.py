"""The tables of question f: tuning, the comparison with its controls, and clipping by lag. Dashes until runs are there."""

from __future__ import annotations

import math

from benchmarks.markdown import table as markdown
from benchmarks.study.questions.settled import (
    ARMS,
    CHOSEN,
    MATCHED,
    RATES,
    SHUFFLED,
    TRUNCATED,
    USUAL_RATE,
    WIDER,
    column_of,
)
from benchmarks.study.reporting.summary import interval
from benchmarks.study.reporting.tables import collapsed, mean_of, percent, signed
from benchmarks.study.results import Results

TUNING, QUESTION, COLUMN = "f-tune", "f", "chosen"
LAGS = tuple(range(9))


def tuning(results: Results) -> str:
    """One row per arm: its mean reward at each setting, the chosen one bold."""
    settings = [*((rate, 1.0) for rate in RATES), (USUAL_RATE, WIDER)]
    rows = []
    for arm in ARMS:
        row = [arm]
        for setting in settings:
            mean = results.mean(TUNING, arm, column_of(*setting), lambda run: run.area).mean
            text = "-" if math.isnan(mean) else f"{mean:.3f}"
            row.append(f"**{text}**" if CHOSEN.get(arm) == setting else text)
        rows.append(row)
    return markdown(["arm", *(column_of(*setting) for setting in settings)], rows)


def comparison(results: Results) -> str:
    """One row per arm: reward, and what it is better or worse than by start model; its price in the learner."""
    head = [
        "arm", "n", "held-out reward, mean over run", f"less *{TRUNCATED}*", f"less *{MATCHED}*", f"less *{SHUFFLED}*",
        "at the end", "collapsed", "learner's CPU s",
    ]  # fmt: skip
    rows = []
    for arm in ARMS:
        found = list(results.at(QUESTION, arm, COLUMN).values())
        differences = [
            "-" if arm == other else signed(results.paired(QUESTION, arm, other, [COLUMN], lambda run: run.area))
            for other in (TRUNCATED, MATCHED, SHUFFLED)
        ]
        seconds = interval([run.sums["cpu_train_s"] + run.sums["cpu_reference_s"] for run in found]).mean
        rows.append(
            [
                arm,
                str(len(found)),
                interval([run.area for run in found]).text(3),
                *differences,
                interval([run.final for run in found]).text(2),
                collapsed(found) if found else "-",
                "-" if math.isnan(seconds) else f"{seconds:.1f}",
            ]
        )
    return markdown(head, rows)


def by_lag(results: Results) -> str:
    """One row per arm: the share of clipped sequences at each lag, and how uneven it is."""
    rows = []
    for arm in ARMS:
        found = list(results.at(QUESTION, arm, COLUMN).values())
        shares = [mean_of(found, f"clip_lag_{lag}") for lag in LAGS]
        spread = "-" if any(map(math.isnan, shares)) else f"{100 * (max(shares) - min(shares)):.0f}"
        rows.append([arm, *map(percent, shares), spread])
    return markdown(["arm", *(f"lag {lag}" for lag in LAGS), "largest less smallest (points)"], rows)
