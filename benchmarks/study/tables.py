"""The study's tables, in Markdown: a mean, a 95 % confidence interval, and how many runs are behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.study.results import Results
from benchmarks.study.summary import RunSummary, interval

FIXED = "fixed (c=0)"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def objectives(results: Results, question: str, column: str) -> str:
    """One row per objective: reward, its price, clipping and noise."""
    head = [
        "objective", "n", "held-out reward, mean over run", "at the end", "tokens to 0.85 (thousands)", "CPU s to 0.85",
        "clipped", "gradient cosine", "noise scale", "collapsed",
    ]  # fmt: skip
    rows = []
    for row in results.rows(question):
        found = list(results.at(question, row, column).values())
        rows.append(
            [
                row,
                str(len(found)),
                str(interval([run.area for run in found])),
                str(interval([run.final for run in found])),
                _reached(found, lambda run, index: run.tokens[index] / 1e3, 0),
                _reached(found, lambda run, index: run.cpu[index], 1),
                percent(interval([run.mean_clip for run in found]).mean),
                interval([run.means.get("grad_cosine_later", math.nan) for run in found]).text(3),
                _noise_scale(found),
                _collapsed(found),
            ]
        )
    return markdown(head, rows)


def staleness(results: Results, question: str) -> str:
    """Bands by lag: the held-out reward averaged over the run, and paired differences to the fixed band over all lags."""
    columns = results.columns(question)
    head = ["band", *(f"lag {column}" for column in columns), f"difference to {FIXED}", "collapsed"]
    rows = []
    for row in results.rows(question):
        found = [run for column in columns for run in results.at(question, row, column).values()]
        paired = results.paired(question, row, FIXED, columns, lambda run: run.area)
        cells = [str(results.mean(question, row, column, lambda run: run.area)) for column in columns]
        rows.append([row, *cells, f"{paired.text(3)} (n = {paired.num})", _collapsed(found)])
    return markdown(head, rows)


def staleness_more(results: Results, question: str, measure: str) -> str:
    """Bands by lag: "final" reward, "batches" to the target, or the "clip" fraction."""
    measures: dict[str, Callable[[list[RunSummary]], str]] = {
        "final": lambda found: str(interval([run.final for run in found])),
        "batches": lambda found: _reached(found, lambda run, index: run.evals[index][0], 0),
        "clip": lambda found: percent(interval([run.mean_clip for run in found]).mean),
    }
    columns = results.columns(question)
    rows = [
        [row, *(measures[measure](list(results.at(question, row, column).values())) for column in columns)]
        for row in results.rows(question)
    ]
    return markdown(["band", *(f"lag {column}" for column in columns)], rows)


def precision(results: Results, measure: Callable[[RunSummary], float], digits: int = 2) -> str:
    """Anchors by sampler."""
    columns = results.columns("c")
    rows = [
        [row, *(results.mean("c", row, column, measure).text(digits) for column in columns)] for row in results.rows("c")
    ]
    return markdown(["objective", *columns], rows)


def mismatch(results: Results) -> str:
    """What each sampler's noise amounts to: sigma and KL, measured at lag 0 with the plain objective."""
    rows = []
    for column in results.columns("c"):
        found = list(results.at("c", "GSPO proximal", column).values())
        sigma = interval([run.means.get("mismatch_sigma", math.nan) for run in found])
        drift = interval([run.means.get("weight", math.nan) for run in found])
        rows.append([column, _scientific(sigma.mean), f"{drift.mean:.4f}", str(len(found))])
    return markdown(["sampler", "sigma per token (nats)", "mean sequence weight", "n"], rows)


def groups(results: Results) -> str:
    """Group sizes, and what weighs a sequence."""
    rows = []
    for row in results.rows("e"):
        for column in results.columns("e"):
            found = list(results.at("e", row, column).values())
            if found:
                rows.append(
                    [
                        f"{row} ({column})",
                        str(len(found)),
                        str(interval([run.area for run in found])),
                        str(interval([run.final for run in found])),
                        _reached(found, lambda run, index: run.evals[index][0], 0),
                        percent(interval([run.means.get("zero_advantage", math.nan) for run in found]).mean),
                        percent(interval([run.mean_clip for run in found]).mean),
                        f"{interval([run.means.get('length', math.nan) for run in found]).mean:.1f}",
                    ]
                )
    head = [
        "",
        "n",
        "reward, mean over run",
        "at the end",
        "batches to 0.85",
        "without signal",
        "clipped",
        "tokens an answer",
    ]
    return markdown(head, rows)


def volatility(probes: Sequence[dict[str, Any]]) -> str:
    """Learning rates by what one and four updates change."""
    keys = list(dict.fromkeys((probe["reference"], probe["learning_rate"], probe["updates"]) for probe in probes))
    names = ("changed", "token_std_free", "token_std_replayed", "sequence_std_free", "sequence_std_replayed")
    rows = []
    for reference, rate, updates in sorted(keys, key=lambda key: (key[0] != "float32", key[2], key[1])):
        found = [p for p in probes if (p["reference"], p["learning_rate"], p["updates"]) == (reference, rate, updates)]
        if updates == 0 and reference == "float32":
            continue
        means = {name: interval([probe[name] for probe in found]) for name in names}
        changed = means["changed"]
        rows.append(
            [
                reference,
                str(updates),
                f"{rate:.0e}" if rate else "-",
                f"{percent(changed.mean)} ± {100 * changed.half_width:.2f}",
                *(_scientific(means[name].mean) for name in names[1:]),
                str(len(found)),
            ]
        )

    stds = ["token ratio std", "with replay", "sequence ratio std", "with replay"]
    head = ["sampled in", "updates", "learning rate", "experts changed", *stds, "n"]
    return markdown(head, rows)


def percent(share: float) -> str:
    """Two significant digits at least."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2f} %"


def _scientific(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _reached(found: Sequence[RunSummary], price: Callable[[RunSummary, int], float], digits: int) -> str:
    """Median price of the target over runs, those that never reach it being the dearest, and how many did."""
    prices = sorted(
        next((price(run, index) for index, (batch, _) in enumerate(run.evals) if batch == run.batches_to_target), math.inf)
        for run in found
    )
    if not prices:
        return "-"
    median = prices[(len(prices) - 1) // 2]
    reached = sum(math.isfinite(each) for each in prices)
    return f"{'never' if math.isinf(median) else f'{median:.{digits}f}'} ({reached}/{len(prices)})"


def _noise_scale(found: Sequence[RunSummary]) -> str:
    """Trace over signal, each averaged over runs first: sequences at which noise and signal are alike."""
    signal = interval([run.means.get("grad_signal_later", math.nan) for run in found]).mean
    trace = interval([run.means.get("grad_trace_later", math.nan) for run in found]).mean
    return f"{trace / signal:.0f}" if signal > 0 else "no signal"


def _collapsed(found: Sequence[RunSummary]) -> str:
    return f"{sum(run.collapsed for run in found)}/{len(found)}"
