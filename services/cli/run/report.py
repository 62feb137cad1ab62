"""The report of a run: a table of first, last and best values. The picture is in plot.py."""

import math
from pathlib import Path

from rich.table import Table

from gspo_services.cli.run.metrics_reader import batch_rows, column, event_rows, read_rows


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
    _add(table, "answer length (tokens)", column(batches, "length/mean"), best=None)
    _add(table, "answers cut off", column(batches, "length/cut_off"), best=None)
    _add(table, "entropy (nats/token)", column(batches, "entropy/all"), best=None)
    _add(table, "tokens/s", column(batches, "tokens_per_s"), best=max)
    table.add_section()
    table.add_row("batches trained", "", str(len(batches)), "")
    table.add_row("optimizer steps", "", f"{sum(_known(column(batches, 'optimizer_steps'))):.0f}", "")
    dropped = event_rows(directory, "dropped")
    table.add_row("groups dropped", "", str(len(dropped)), "")
    left_out = sum(_known(column(batches, "num_left_out_groups")))
    if left_out:
        table.add_row("groups left out (no signal)", "", f"{left_out:.0f}", "")
    aside = {row.get("batch") for row in event_rows(directory, "set_aside")}
    table.add_row("batches set aside", "", str(len(aside)), "")
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
