"""Plots. Colours are Okabe and Ito's, which colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.autoscaling.control import Run
from benchmarks.autoscaling.measures import Row
from benchmarks.autoscaling.signals import SCRAPE_S

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DPI = 80
SMOOTH_S = 600.0


def draw_map(sizes: Mapping[int, Sequence[Row]], path: Path) -> None:
    """Plot wait and lag of fixed fleets by their size."""
    figure, (waits, lags) = plt.subplots(1, 2, figsize=(11, 4))
    for colour, (max_lag, rows) in zip(COLOURS, sizes.items(), strict=False):
        places = [row.quartiles("pods")[1] / row.fluid_size for row in rows]
        label = f"max_lag {max_lag}"
        waits.plot(places, [100 * row.quartiles("waiting")[1] for row in rows], "o-", color=colour, label=label)
        lags.plot(places, [row.quartiles("lag_used")[1] for row in rows], "o-", color=colour, label=label)
    waits.axhline(5, color="grey", linewidth=0.8)
    waits.set_ylabel("learner waits, %")
    lags.axhline(0.5, color="grey", linewidth=0.8)
    lags.set_ylabel("mean lag / max_lag")
    for axes in (waits, lags):
        axes.set_xlabel("rollouts / fluid size")
        axes.set_ylim(bottom=0)
        axes.legend()
    _save(figure, path)


def draw_signals(runs: Mapping[str, Run], path: Path) -> None:
    """Plot pods over time, one line per signal."""
    figure, axes = plt.subplots(figsize=(9, 4))
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        axes.step([at / 60 for at, _ in run.replicas], [n for _, n in run.replicas], color=colour, label=name, where="post")
        axes.axhline(run.config.fluid_size(), color="grey", linewidth=0.8)
    axes.set_xlabel("minutes")
    axes.set_ylabel("pods (grey: fluid size)")
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))
    _save(figure, path)


def draw_weathers(runs: Mapping[str, Run], path: Path) -> None:
    """Plot serving pods, the learner's wait over ten minutes, and mean lag."""
    figure, rows = plt.subplots(3, len(runs), figsize=(3.4 * len(runs), 7), sharex="col", sharey="row")
    for column, (name, run) in enumerate(runs.items()):
        pods, wait, lag = (rows[index][column] for index in range(3))
        times = [scrape.at / 60 for scrape in run.scrapes]
        pods.step([at / 60 for at, _ in run.replicas], [n for _, n in run.replicas], color=COLOURS[1], label="pods")
        pods.plot(times, [scrape.serving for scrape in run.scrapes], color=COLOURS[0], label="serving")
        pods.axhline(run.config.fluid_size(), color="grey", linewidth=0.8)
        pods.set_title(name, fontsize=10)
        step = round(SMOOTH_S / SCRAPE_S)
        waits = [100 * (b.wait_s - a.wait_s) / SMOOTH_S for a, b in zip(run.scrapes, run.scrapes[step:], strict=False)]
        wait.plot(times[step:], waits, color=COLOURS[0])
        lag.plot([b.at / 60 for b in run.batches], [b.mean_lag / run.config.max_lag for b in run.batches], color=COLOURS[0])
        lag.set_xlabel("minutes")
    rows[0][0].legend()
    for index, label in enumerate(("pods (grey: fluid size)", "learner waits, % of 10 min", "mean lag / max_lag")):
        rows[index][0].set_ylabel(label)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
