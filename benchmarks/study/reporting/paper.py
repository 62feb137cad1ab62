"""The tables of g and g-engine: every arm has its row from the beginning, with dashes until its runs are there."""

from __future__ import annotations

import math
from collections.abc import Iterable

from benchmarks.markdown import table as markdown
from benchmarks.study.questions.paper import ARMS, COLUMN, ENGINE_ARMS, ENGINE_COLUMN, GSPO
from benchmarks.study.reporting.summary import interval
from benchmarks.study.reporting.tables import collapsed, mean_of, percent, reached, signed
from benchmarks.study.results import Results


def paper(results: Results) -> str:
    """One row per objective: reward against GSPO's, stability, clipping, volatility and price."""
    return _table(results, "g", ARMS, COLUMN)


def engine(results: Results) -> str:
    """The same for those that replay an engine's experts, and the ones beside them."""
    return _table(results, "g-engine", ENGINE_ARMS, ENGINE_COLUMN)


def _table(results: Results, question: str, arms: Iterable[str], column: str) -> str:
    head = [
        "objective", "n", "held-out reward, mean over run", f"difference to {GSPO}", "at the end", "worst drop",
        "collapsed", "clipped", "experts changed", "tokens to half (thousands)",
    ]  # fmt: skip
    rows = []
    for row in arms:
        found = list(results.at(question, row, column).values())
        difference = results.paired(question, row, GSPO, [column], lambda run: run.area)
        rows.append(
            [
                row,
                str(len(found)),
                _two_digits([run.area for run in found]),
                "-" if row == GSPO else signed(difference),
                _two_digits([run.final for run in found]),
                _two_digits([run.worst_drop for run in found]),
                collapsed(found) if found else "-",
                percent(interval([run.mean_clip for run in found]).mean),
                percent(mean_of(found, "changed_after")),
                reached(found, lambda run, index: run.tokens[index] / 1e3, 0),
            ]
        )
    return markdown(head, rows)


def _two_digits(values: list[float]) -> str:
    mean = interval(values).mean
    return "-" if math.isnan(mean) else f"{mean:.2f}"
