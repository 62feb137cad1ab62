"""The study's tables in Markdown: a mean, a 95 % confidence interval, and the number of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.markdown import table as markdown
from benchmarks.study.reporting.summary import Interval, RunSummary, interval
from benchmarks.study.results import Results

FIXED = "fixed (c=0)"


def objectives(results: Results, question: str, column: str, baseline: str) -> str:
    """One row per objective: reward, its price, clipping and noise."""
    head = [
        "objective", "n", "held-out reward, mean over run", f"difference to {baseline}", "at the end",
        "sampled reward", "tokens to half (thousands)", "CPU s to half", "clipped", "high / low",
        "gradient cosine", "collapsed",
    ]  # fmt: skip
    rows = []
    for row in results.rows(question):
        found = list(results.at(question, row, column).values())
        difference = results.paired(question, row, baseline, [column], lambda run: run.area)
        high, low = (mean_of(found, name) for name in ("clip_high", "clip_low"))
        rows.append(
            [
                row,
                str(len(found)),
                f"{interval([run.area for run in found]).mean:.2f}",
                "-" if row == baseline else signed(difference),
                f"{interval([run.final for run in found]).mean:.2f}",
                f"{interval([run.sampled for run in found]).mean:.2f}",
                reached(found, lambda run, index: run.tokens[index] / 1e3, 0),
                reached(found, lambda run, index: run.cpu[index], 1),
                percent(interval([run.mean_clip for run in found]).mean),
                f"{percent(high)} / {percent(low)}",
                interval([run.means.get("grad_cosine_later", math.nan) for run in found]).text(3),
                collapsed(found),
            ]
        )
    return markdown(head, rows)


def staleness(results: Results, question: str) -> str:
    """Clip ranges by lag: the held-out reward averaged over the run, and paired differences to the fixed clip range."""
    columns = results.columns(question)
    head = [
        "clip range",
        *(f"lag {column}" for column in columns),
        f"difference to {FIXED}, lag 0 left out",
        "n",
        "collapsed",
    ]
    stale = [column for column in columns if column != "0"]
    rows = []
    for row in results.rows(question):
        found = [run for column in columns for run in results.at(question, row, column).values()]
        paired = results.paired(question, row, FIXED, stale, lambda run: run.area)
        means = [results.mean(question, row, column, lambda run: run.area).mean for column in columns]
        cells = ["-" if math.isnan(mean) else f"{mean:.2f}" for mean in means]
        rows.append([row, *cells, "-" if row == FIXED else signed(paired), str(paired.num), collapsed(found)])
    return markdown(head, rows)


def staleness_more(results: Results, question: str, measure: str) -> str:
    """Clip ranges by lag: "batches" to the target, or the "clip" fraction."""
    measures: dict[str, Callable[[list[RunSummary]], str]] = {
        "batches": lambda found: reached(found, lambda run, index: run.evals[index][0], 0),
        "clip": lambda found: percent(interval([run.mean_clip for run in found]).mean),
    }
    columns = results.columns(question)
    rows = [
        [row, *(measures[measure](list(results.at(question, row, column).values())) for column in columns)]
        for row in results.rows(question)
    ]
    return markdown(["clip range", *(f"lag {column}" for column in columns)], rows)


def precision(results: Results) -> str:
    """Anchors by sampler: the difference to the same objective, seed and start with an exact sampler."""
    columns = results.columns("c")
    rows = []
    for row in results.rows("c"):
        cells = []
        for column in columns:
            exact, found = results.at("c", row, columns[0]), results.at("c", row, column)
            if column == columns[0]:
                cells.append(f"{interval([run.area for run in found.values()]).mean:.2f}")
            else:
                cells.append(signed(interval([found[seed].area - exact[seed].area for seed in found if seed in exact])))
        rows.append([row, *cells])
    return markdown(["objective", *columns], rows)


def precision_clip(results: Results) -> str:
    """Anchors by sampler: the clipped share of tokens."""
    columns = results.columns("c")
    rows = [
        [row, *(percent(results.mean("c", row, column, lambda run: run.mean_clip).mean) for column in columns)]
        for row in results.rows("c")
    ]
    return markdown(["objective", *columns], rows)


def mismatch(results: Results) -> str:
    """The size of each sampler's noise: sigma, and the truncated weight of a sequence."""
    rows = []
    for column in results.columns("c"):
        found = list(results.at("c", "GSPO proximal, truncated", column).values())
        weight = mean_of(found, "weight")
        rows.append([column, _scientific(mean_of(found, "mismatch_sigma")), f"{weight:.3f}", str(len(found))])
    return markdown(["sampler", "sigma per token (nats)", "mean truncated weight", "n"], rows)


def groups(results: Results) -> str:
    """Group sizes against groups of 8, and length weights against sequence weights."""
    rows = []
    for row in results.rows("e"):
        column, baseline = ("arithmetic", "group of 8") if row.startswith("group") else ("countdown", "sequence-weighted")
        found = list(results.at("e", row, column).values())
        difference = results.paired("e", row, baseline, [column], lambda run: run.area)
        rows.append(
            [
                f"{row} ({column})",
                str(len(found)),
                f"{interval([run.area for run in found]).mean:.2f}",
                "-" if row == baseline else signed(difference),
                f"{interval([run.final for run in found]).mean:.2f}",
                reached(found, lambda run, index: run.evals[index][0], 0),
                percent(mean_of(found, "zero_advantage")),
                percent(interval([run.mean_clip for run in found]).mean),
                f"{mean_of(found, 'length'):.1f}",
            ]
        )
    measured = ["reward, mean over run", "difference", "at the end", "batches to half", "zero-advantage groups", "clipped"]
    return markdown(["", "n", *measured, "tokens an answer"], rows)


def proximal_pair(results: Results, questions: Mapping[str, str]) -> str:
    """What truncated weights add to the proximal anchor; ``questions``: by name, with the answers' description."""
    rows = []
    for question, answers in questions.items():
        columns = [column for column in results.columns(question) if column != "0"]
        for chosen in [[column] for column in columns] + [columns]:
            difference = results.paired(question, "proximal, truncated", "proximal", chosen, lambda run: run.area)
            found = [run for column in chosen for run in results.at(question, "proximal, truncated", column).values()]
            lag = chosen[0] if len(chosen) == 1 else "all of these"
            rows.append([answers, lag, signed(difference), f"{mean_of(found, 'weight'):.3f}", str(difference.num)])
    return markdown(["answers", "lag", "truncated less plain proximal", "mean weight", "n"], rows)


def volatility(probes: Sequence[dict[str, Any]]) -> str:
    """Changes after one and four updates by learning rate; below, the changes from sampling in bf16 alone."""
    keys = list(dict.fromkeys((probe["reference"], probe["learning_rate"], probe["updates"]) for probe in probes))
    chosen = [key for key in keys if (key[0] == "float32") == (key[2] > 0)]
    names = ("changed", "token_std_free", "token_std_replayed", "sequence_std_free", "sequence_std_replayed")
    rows = []
    for reference, rate, updates in sorted(chosen, key=lambda key: (key[0] != "float32", key[2], key[1])):
        found = [p for p in probes if (p["reference"], p["learning_rate"], p["updates"]) == (reference, rate, updates)]
        means = {name: interval([probe[name] for probe in found]) for name in names}
        changed = means["changed"]
        rows.append(
            [
                reference,
                str(updates),
                f"{rate:.0e}" if rate else "-",
                f"{100 * changed.mean:.2f} ± {100 * changed.half_width:.2f} %",
                *(_scientific(means[name].mean) for name in names[1:]),
                percent(interval([probe["outside_grpo_free"] for probe in found]).mean),
                str(len(found)),
            ]
        )
    stds = ["token log-ratio std", "with replay", "sequence log-ratio std", "with replay", "tokens outside 0.8 .. 1.27"]
    return markdown(["sampled in", "updates", "learning rate", "experts changed", *stds, "n"], rows)


def signed(difference: Interval) -> str:
    """Format a difference with its interval; bold where the interval excludes 0."""
    if difference.num == 0:
        return "-"
    sign = "+" if difference.mean >= 0 else "-"
    width = "" if math.isnan(difference.half_width) else f" ± {difference.half_width:.3f}"
    text = f"{sign}{abs(difference.mean):.3f}{width}"
    return f"**{text}**" if abs(difference.mean) > difference.half_width else text


def percent(share: float) -> str:
    """Format a share with at least two significant digits."""
    if math.isnan(share):
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2f} %"


def _scientific(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def reached(found: Sequence[RunSummary], price: Callable[[RunSummary, int], float], digits: int) -> str:
    """Return the median price of the target over runs (infinite for those that never reach it), and how many did."""
    prices = sorted(
        next((price(run, index) for index, (batch, _) in enumerate(run.evals) if batch == run.batches_to_target), math.inf)
        for run in found
    )
    if not prices:
        return "-"
    median = prices[(len(prices) - 1) // 2]
    reached = sum(math.isfinite(each) for each in prices)
    return f"{'never' if math.isinf(median) else f'{median:.{digits}f}'} ({reached}/{len(prices)})"


def mean_of(found: Sequence[RunSummary], name: str) -> float:
    """Return the mean over runs of one of their means."""
    return interval([run.means.get(name, math.nan) for run in found]).mean


def collapsed(found: Sequence[RunSummary]) -> str:
    """Count the collapsed runs."""
    return f"{sum(run.collapsed for run in found)}/{len(found)}"


def wider_eps(results: Results) -> str:
    """The gain of ten times the paper's eps over the paper's, wherever both were run."""
    wide, paper = "GSPO 3e-3/4e-3", "GSPO 3e-4/4e-4"
    rows = [
        [f"lag 0, learning rate {rate}", signed(difference), str(difference.num)]
        for question, rate in (("a", "2e-4"), ("a-collapse", "5e-4"), ("a-collapse", "1e-3"))
        if (difference := results.paired(question, wide, paper, [rate], lambda run: run.area)).num
    ]
    for row in results.rows("d-more"):
        ours, theirs = (results.at("d-more", row, f"4, eps {eps}") for eps in ("3e-3/4e-3", "3e-4/4e-4"))
        gained = interval([ours[seed].area - theirs[seed].area for seed in ours if seed in theirs])
        rows.append([f"lag 4, learning rate 2e-4, {row}", signed(gained), str(gained.num)])
    return markdown(["", "3e-3/4e-3 less 3e-4/4e-4", "n"], rows)
