"""The study's plots, in Okabe and Ito's colours, which colour-blind readers can tell apart; markers differ too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.study import real_model
from benchmarks.study.questions.settled import CALIBRATED, MATCHED, RECENTRED, SHUFFLED
from benchmarks.study.reporting import margin
from benchmarks.study.reporting.summary import Interval, RunSummary, interval
from benchmarks.study.results import Results

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DPI = 80
FIXED = "fixed (c=0)"
LAGS = ("0", "0..2", "1", "4", "16", "64")


def draw_all(
    results: Results,
    probes: Sequence[dict[str, Any]],
    directory: Path,
    outcomes: Sequence[real_model.Outcome] = (),
    masters: Sequence[real_model.Outcome] = (),
) -> list[Path]:
    """Draw every plot that has runs; return the files. ``outcomes``: of question k. ``masters``: of question l."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    choices: list[tuple[str, Callable[[], Any], bool]] = [
        ("volatility", lambda: _volatility(probes), bool(probes)),
        ("staleness", lambda: _staleness(results), bool(results.rows("d-short"))),
        ("settled", lambda: _settled(results), bool(results.rows("f"))),
        ("paper", lambda: _paper(results), bool(results.rows("g"))),
        ("margin", lambda: _margin(results), not margin.missing(results)),
        ("real_model", lambda: _real_model(outcomes), bool(outcomes)),
        ("masters", lambda: _real_model(masters), bool(masters)),
    ]
    for name, draw, present in choices:
        if present:
            path = directory / f"{name}.png"
            figure = draw()
            figure.savefig(path, dpi=DPI)
            plt.close(figure)
            drawn.append(path)
    return drawn


def _settled(results: Results) -> Any:
    """Width of the clip range and clipped share by lag, for the arms without a pass over the batch."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, arm in enumerate(("fixed", "c = 1", CALIBRATED, RECENTRED, MATCHED, SHUFFLED)):
        found = list(results.at("f", arm, "chosen").values())
        for plot, name in zip(axes, ("width", "clip"), strict=True):
            lags = [lag for lag in range(9) if any(f"{name}_lag_{lag}" in run.means for run in found)]
            means = [
                interval([run.means[key] for run in found if (key := f"{name}_lag_{lag}") in run.means]) for lag in lags
            ]
            if lags:
                _points(plot, index, arm, lags, means)
    labels = ("width of the clip range, low and high together", "clipped share of sequences")
    for plot, label in zip(axes, labels, strict=True):
        plot.set(xlabel="lag (versions)", ylabel=label)
    axes[0].set_yscale("log")
    axes[1].legend(fontsize=8)
    return figure


def _curve(runs: Sequence[RunSummary], at: Callable[[RunSummary, int], float]) -> tuple[list[float], list[float]]:
    """Return mean position and mean held-out reward at each evaluation that all runs have."""
    length = min(len(run.evals) for run in runs)
    places = [sum(at(run, index) for run in runs) / len(runs) for index in range(length)]
    return places, [interval([run.evals[index][1] for run in runs]).mean for index in range(length)]


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}


def _points(axes: Any, index: int, label: str, places: Sequence[float], values: Sequence[Interval]) -> None:
    """Plot means with their confidence intervals."""
    widths = [0.0 if math.isnan(value.half_width) else value.half_width for value in values]
    bars = {"linestyle": "none", "capsize": 2, "elinewidth": 0.9}
    axes.errorbar(places, [value.mean for value in values], yerr=widths, label=label, **_style(index), **bars)


def _figure(columns: int, width: float = 12.0, height: float = 4.2) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), constrained_layout=True, squeeze=False)
    for each in axes[0]:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _volatility(probes: Sequence[dict[str, Any]]) -> Any:
    figure, (changed, ratios) = _figure(2)
    rates = sorted({probe["learning_rate"] for probe in probes} - {0.0})

    def means(name: str, updates: int, reference: str) -> list[float]:
        return [
            interval(
                [
                    probe[name]
                    for probe in probes
                    if (probe["learning_rate"], probe["updates"], probe["reference"]) == (rate, updates, reference)
                ]
            ).mean
            for rate in rates
        ]

    styles = [("float32", 1), ("float32", 4), ("bf16", 1), ("bf16", 4)]
    for index, (reference, updates) in enumerate(styles):
        label = f"{updates} update{'s' if updates > 1 else ''}, sampled in {reference}"
        shares = [100 * value for value in means("changed", updates, reference)]
        changed.plot(rates, shares, color=COLOURS[index], marker=MARKERS[index], label=label)
    changed.axhline(10, color="#555555", linestyle=":", linewidth=1)
    changed.annotate("paper: about 10 % (48 layers)", (rates[0], 11), fontsize=8, color="#555555")
    changed.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="experts changed (% of picks)")
    changed.legend(fontsize=8)
    for index, (name, label) in enumerate(
        (
            ("token_std_free", "token, routers choose"),
            ("token_std_replayed", "token, experts replayed"),
            ("sequence_std_free", "sequence, routers choose"),
            ("sequence_std_replayed", "sequence, experts replayed"),
        )
    ):
        style = "-" if "free" in name else "--"
        colour = COLOURS[index // 2]
        ratios.plot(rates, means(name, 4, "float32"), style, color=colour, marker=MARKERS[index], label=label)
    ratios.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="std of log-ratio after 4 updates (nats)")
    ratios.axhline(3.5e-4, color="#555555", linestyle=":", linewidth=1)
    ratios.annotate("GSPO's clip, 3.5e-4", (rates[0], 4e-4), fontsize=8, color="#555555")
    ratios.legend(fontsize=8)
    return figure


def _staleness(results: Results) -> Any:
    """Plot short answers above and long ones below: reward, its difference to the fixed clip range, and clipping."""
    figure, panels = plt.subplots(2, 3, figsize=(15.0, 8.4), constrained_layout=True)
    order = results.rows("d-short")
    for line, (names, title) in enumerate(((("d-short", "d-oldest"), "short answers"), (("d-long",), "long answers"))):
        used = [lag for lag in LAGS if any(lag in results.columns(name) for name in names)]
        for row in results.rows(names[0]):
            index = order.index(row)
            found = [(name, lag) for lag in used for name in names if results.at(name, row, lag)]
            places = [used.index(lag) + 0.08 * (index - len(order) / 2) for _, lag in found]
            means = [results.mean(name, row, lag, lambda run: run.area).mean for name, lag in found]
            panels[line, 0].plot(places, means, linewidth=1, label=row, **_style(index))
            if row != FIXED:
                paired = [results.paired(name, row, FIXED, [lag], lambda run: run.area) for name, lag in found]
                _points(panels[line, 1], index, row, places, paired)
            clips = [results.mean(name, row, lag, lambda run: run.mean_clip) for name, lag in found]
            _points(panels[line, 2], index, row, places, clips)
        for axes, label in zip(
            panels[line],
            ("held-out reward, mean over the run", "its difference to the fixed clip range", "clipped share of tokens"),
            strict=True,
        ):
            axes.set(ylabel=label, xlabel="lag (batches)", title=title)
            axes.set_xticks(range(len(used)), used)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        panels[line, 1].axhline(0, color="#555555", linewidth=0.8)
        panels[line, 1].set_ylim(-0.45, 0.35)
    panels[0, 0].legend(fontsize=7, loc="lower left")
    return figure


def _paper(results: Results) -> Any:
    figure, (rewards, changed, clips) = _figure(3, 14.0)
    (column,) = results.columns("g")
    for index, row in enumerate(results.rows("g")):
        runs = list(results.at("g", row, column).values())
        rewards.plot(*_curve(runs, lambda run, at: run.tokens[at] / 1e6), label=row, **_style(index))
        length = min(len(run.changed) for run in runs)
        shares = [100 * interval([run.changed[at] for run in runs]).mean for at in range(length)]
        changed.plot([runs[0].evals[at][0] for at in range(length)], shares, **_style(index))
        length = min(len(run.clip) for run in runs)
        clipped = [interval([run.clip[batch] for run in runs]).mean for batch in range(length)]
        clips.plot(range(1, length + 1), clipped, color=COLOURS[index], linewidth=1)
    rewards.set(xlabel="action tokens trained on (millions)", ylabel="held-out reward, mean over seeds")
    changed.set(xlabel="batch", ylabel="experts changed by a batch (% of picks)", ylim=(0, None))
    changed.axhline(10, color="#555555", linestyle=":", linewidth=1)
    changed.annotate("paper: about 10 % (48 layers)", (25, 8.2), fontsize=8, color="#555555")
    clips.set(xlabel="batch", ylabel="clipped share of tokens", yscale="log")
    rewards.legend(fontsize=8, loc="lower right")
    figure.suptitle("Six layers of 64 experts, answers of 100 to 160 tokens, lag 0", fontsize=11)
    return figure


def _margin(results: Results) -> Any:
    """Held-out reward at the end by learning rate: the arms' means, and each run, with a cross if it collapsed."""
    figure, (rewards,) = _figure(1, 8.0)
    for index, arm in enumerate(margin.ARMS):
        by_rate = {rate: list(margin.found(results, arm, rate).values()) for rate in margin.ALL_RATES}
        whole = {rate: runs for rate, runs in by_rate.items() if len(runs) == len(margin.SEEDS)}
        means = [interval([run.final for run in runs]).mean for runs in whole.values()]
        rewards.plot(list(whole), means, label=arm, **_style(index))
        for rate, runs in by_rate.items():
            for run in runs:
                place, marker = rate * 1.05 ** (index - 1.5), "x" if run.collapsed else MARKERS[index]
                rewards.plot(
                    place, run.final, marker=marker, color=COLOURS[index], alpha=0.5, markersize=5, linestyle="none"
                )
    rewards.set(xscale="log", xlabel="learning rate", ylabel="held-out reward at the end", title="Crosses have collapsed")
    rewards.set_xticks(margin.ALL_RATES, [f"{rate:g}" for rate in margin.ALL_RATES], minor=False)
    rewards.set_xticks([], minor=True)
    rewards.legend(fontsize=8)
    return figure


def _real_model(outcomes: Sequence[real_model.Outcome]) -> Any:
    """Held-out reward by batch: the arms' means over seeds, and a thin line for each run."""
    figure, (rewards,) = _figure(1, 7.0)
    for index, arm in enumerate(dict.fromkeys(each.arm for each in outcomes)):
        curves = [[each.start, *each.rewards] for each in outcomes if each.arm == arm]
        places = [real_model.EVERY_BATCHES * at for at in range(len(curves[0]))]
        for curve in curves:
            rewards.plot(places, curve, color=COLOURS[index], linewidth=0.7, alpha=0.35)
        rewards.plot(places, [interval(values).mean for values in zip(*curves, strict=True)], label=arm, **_style(index))
    rewards.set(xlabel="batches trained", ylabel="held-out reward", ylim=(0, 1), title="SmolLM2-135M learns sums, max_lag 2")
    rewards.legend(fontsize=8, loc="lower right")
    return figure
