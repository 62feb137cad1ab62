"""The report of a run: a table, and a plot of reward, lag, clip fraction and throughput."""

import math
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from services.cli.run.metrics_reader import batch_rows, column, read_rows

PLOT_FILE: Final = "plot.png"


def summary_table(directory: Path) -> Table:
    """First, last and best values of the main measures, from the run's metrics.jsonl."""
    evals = read_rows(directory / "metrics.jsonl", "eval")
    batches = batch_rows(directory / "metrics.jsonl")
    table = Table(title=f"Run {directory}", show_header=True)
    for heading in ("measure", "first", "last", "best"):
        table.add_column(heading, justify="left" if heading == "measure" else "right")
    _add(table, "held-out reward", column(evals, "eval/reward"), best=max)
    _add(table, "training reward", column(batches, "reward_mean"), best=max)
    _add(table, "lag (versions)", column(batches, "lag/all"), best=None)
    _add(table, "clip fraction", column(batches, "clip_fraction/all"), best=None)
    _add(table, "mismatch sigma", column(batches, "mismatch_sigma"), best=None)
    _add(table, "entropy (nats/token)", column(batches, "entropy/all"), best=None)
    _add(table, "tokens/s", column(batches, "tokens_per_s"), best=max)
    table.add_section()
    table.add_row("batches trained", "", str(len(batches)), "")
    table.add_row("optimizer steps", "", f"{sum(_known(column(batches, 'optimizer_steps'))):.0f}", "")
    dropped = read_rows(directory / "metrics.jsonl", "dropped")
    table.add_row("groups dropped", "", str(len(dropped)), "")
    table.add_row("batches set aside", "", str(len(read_rows(directory / "metrics.jsonl", "set_aside"))), "")
    if batches:
        table.add_row("seconds", "", f"{column(batches, 'time_s')[-1]:.0f}", "")
    return table


def _known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _add(table: Table, name: str, values: list[float], *, best: object) -> None:
    known = _known(values)
    if not known:
        table.add_row(name, "-", "-", "-")
        return
    top = f"{max(known):.4g}" if best is max else ""
    table.add_row(name, f"{known[0]:.4g}", f"{known[-1]:.4g}", top)


def write_plot(directory: Path) -> Path:
    """Write plot.png into the run's directory. Raises: ValueError when there is nothing to draw, OSError."""
    # matplotlib takes a second to import, so it is imported only when a plot is wanted.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evals = read_rows(directory / "metrics.jsonl", "eval")
    batches = batch_rows(directory / "metrics.jsonl")
    if not batches and not evals:
        raise ValueError(f"{directory / 'metrics.jsonl'}: no batch and no evaluation recorded yet, nothing to draw")
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    figure.suptitle(str(directory))
    index = column(batches, "batch")
    reward, lag, speed, clip, clip_range, drift = axes.flat
    reward.plot(index, column(batches, "reward_mean"), color="tab:blue", alpha=0.5, label="training")
    reward.plot(column(evals, "batch"), column(evals, "eval/reward"), "o-", color="tab:orange", label="held out")
    reward.set(title="Reward", xlabel="batch")
    for row in read_rows(directory / "metrics.jsonl", "set_aside"):
        reward.axvline(row["batch"], color="tab:red", linestyle=":", label=f"batch {row['batch']} set aside")
    rewards = _known([*column(batches, "reward_mean"), *column(evals, "eval/reward")])
    if all(0 <= value <= 1 for value in rewards):
        reward.set_ylim(-0.02, 1.05)
    reward.legend()
    lag.plot(index, column(batches, "lag/all"), color="tab:blue", label="mean")
    lag.plot(index, column(batches, "lag/max"), color="tab:red", alpha=0.5, label="largest")
    lag.set(title="Lag (policy versions)", xlabel="batch")
    lag.legend()
    _draw_by_lag(clip, batches, "clip_fraction")
    clip.set(title="Sequences clipped", xlabel="batch", ylim=(-0.02, 1.02))
    _draw_by_lag(clip_range, batches, "clip_range_high", "clip_range_low")
    clip_range.set(title="Clip range (bounds of the log-ratio, nats)", xlabel="batch")
    _draw_by_lag(drift, batches, "mismatch")
    drift.set(title="Learner against engine (mean log-ratio, nats)", xlabel="batch")
    speed.plot(index, column(batches, "tokens_per_s"), color="tab:green")
    speed.set(title="Throughput (tokens/s, trained on)", xlabel="batch")
    speed.set_ylim(bottom=0)
    path, begun = directory / PLOT_FILE, directory / f".{PLOT_FILE}"
    try:
        figure.savefig(begun, format="png", dpi=110)
        begun.replace(path)  # A full disk leaves the former picture whole.
    finally:
        begun.unlink(missing_ok=True)
        pyplot.close(figure)
    return path


def _draw_by_lag(axes: Any, batches: list[dict[str, Any]], *names: str) -> None:
    """One curve for each name and lag; the curves of one lag have one colour."""
    index = column(batches, "batch")
    for bucket, label, colour in _LAGS:
        for name in names:
            values = column(batches, f"{name}/{bucket}")
            if _known(values):
                axes.plot(index, values, label=label if name == names[0] else None, color=colour)
    if axes.lines:
        axes.legend()


_LAGS: Final = (
    ("all", "all", "black"),
    ("lag_0", "lag 0", "tab:blue"),
    ("lag_1", "lag 0-1", "tab:orange"),
    ("lag_2", "lag 1-2", "tab:red"),
    ("lag_3_4", "lag 2-4", "tab:purple"),
    ("lag_5_up", "lag 4 and more", "tab:brown"),
)
