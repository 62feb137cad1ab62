"""The report of a run: a table of first, last and best values. The picture is in plot.py."""

from pathlib import Path

from rich.table import Table

from gspo_services.runs.learning import outcome_of
from gspo_services.runs.metrics import RunMetrics, column, known
from gspo_services.shared.runtime.plain_text import one_line


def summary_table(metrics: RunMetrics) -> Table:
    """First, last and best values of the main measures."""
    batches, events = metrics.batches, metrics.events
    table = Table(title=f"Run {metrics.path.parent}", show_header=True)
    for heading in ("measure", "first", "last", "best"):
        table.add_column(heading, justify="left" if heading == "measure" else "right")
    _add(table, "held-out reward", [each.reward for each in metrics.evaluations], best=True)
    _add(table, "training reward", column(batches, "reward_mean"), best=True)
    _add(table, "lag (versions)", column(batches, "lag/all"), best=False)
    _add(table, "clip fraction", column(batches, "clip_fraction/all"), best=False)
    _add(table, "mismatch sigma", column(batches, "mismatch_sigma"), best=False)
    _add(table, "answer length (tokens)", column(batches, "length/mean"), best=False)
    _add(table, "answers cut off", column(batches, "length/cut_off"), best=False)
    _add(table, "entropy (nats/token)", column(batches, "entropy/all"), best=False)
    _add(table, "tokens/s", column(batches, "tokens_per_s"), best=True)
    table.add_section()
    table.add_row("batches trained", "", str(len(batches)), "")
    table.add_row("optimizer steps", "", f"{sum(known(column(batches, 'optimizer_steps'))):.0f}", "")
    table.add_row("groups dropped", "", str(sum(row["event"] == "dropped" for _, row in events)), "")
    filtered = sum(known(column(batches, "num_filtered_groups")))
    if filtered:
        table.add_row("zero-advantage groups filtered out", "", f"{filtered:.0f}", "")
    quarantined = {batch for batch, row in events if row["event"] == "quarantined"}
    table.add_row("batches quarantined", "", str(len(quarantined)), "")
    if batches:
        table.add_row("seconds", "", f"{column(batches, 'time_s')[-1]:.0f}", "")
    return table


def learning_lines(metrics: RunMetrics, directory: Path) -> list[str]:
    """What keeps the run from learning, as of its last batch, and as the last line whether it learned."""
    found = [f"{'!' if each.is_wrong else 'note:'} {each}" for each in metrics.learning.findings]
    return list(map(one_line, [*found, outcome_of(directory, metrics.learning)]))


def _add(table: Table, name: str, values: list[float], *, best: bool) -> None:
    found = known(values)
    if not found:
        table.add_row(name, "-", "-", "-")
        return
    top = f"{max(found):.4g}" if best else ""
    table.add_row(name, f"{found[0]:.4g}", f"{found[-1]:.4g}", top)
