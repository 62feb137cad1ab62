"""``gspo compare RUN RUN...``: compare the settings and the results of runs."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from gspo_services.runs.compare import Comparison, GroupMeasure, SeedGroup, as_plain, compare_runs
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.errors import ConfigurationError

DESCRIPTION: Final = """\
Compare runs: the settings that differ (by section, defaults filled in), and their results. Runs that differ only in their
seed form one group: its measures and curves are means, with 95 % intervals over the seeds. Runs may have different lengths,
and may be unfinished or active. Addresses, ports and directories are not compared.

  gspo compare runs/a runs/b                          tables
  gspo compare runs/a-* runs/b-* --png compare.png    also draw curves over batches, tokens and seconds
  gspo compare runs/a runs/b --json                   everything as JSON, curves included

Status 0: done; 2: no such run, or nothing to compare.
"""


def compare_command(words: Sequence[str]) -> int:
    """Parse ``words``, compare and print. Returns the exit status.

    Raises: ConfigurationError; OSError when the picture cannot be written.
    """
    arguments = _parser().parse_args(words)
    png: Path | None = arguments.png
    if png is not None and png.is_dir():
        raise ConfigurationError(f"--png is {png}, a directory: name a file, such as {png / 'compare.png'}")
    comparison = compare_runs(arguments.runs)
    if png is not None:
        from gspo_services.cli.compare.picture import draw

        draw(comparison, png)
    if arguments.json:
        print(json.dumps(as_plain(comparison), indent=2, allow_nan=False))
        return 0
    console = PlainConsole()
    _print_groups(comparison, console)
    _print_differences(comparison, console)
    console.print(measures_table(comparison))
    if any(len(group.runs) > 1 for group in comparison.groups):
        console.print("+-: half of the 95 % interval of the mean over seeds (Student's t)", soft_wrap=True)
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if png is not None:
        console.print(str(png), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo compare", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory; at least two")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw reward over batches, tokens and seconds")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, curves included")
    return parser


def _print_groups(comparison: Comparison, console: PlainConsole) -> None:
    table = Table(title="Runs")
    for heading in ("", "run", "seed", "state", "batches"):
        table.add_column(heading, justify="right" if heading in ("seed", "batches") else "left", overflow="fold")
    for group in comparison.groups:
        for run in group.runs:
            wanted = "?" if run.num_batches is None else run.num_batches
            seed = "?" if run.seed is None else run.seed
            table.add_row(group.name, str(run.directory), str(seed), run.state, f"{run.num_trained}/{wanted}")
    console.print(table)


def _print_differences(comparison: Comparison, console: PlainConsole) -> None:
    if len(comparison.groups) == 1:
        console.print("the runs differ only in their seed", soft_wrap=True)
        return
    if not comparison.differences:
        console.print("no setting is known to differ", soft_wrap=True)
        return
    table = Table(title="Settings that differ")
    for heading in ("section", "setting", *(group.name for group in comparison.groups)):
        table.add_column(heading, overflow="fold")
    last = ""
    for (section, key), values in comparison.differences.items():
        if last and section != last:
            table.add_section()
        table.add_row("" if section == last else section, key, *values)
        last = section
    console.print(table)


def measures_table(comparison: Comparison) -> Table:
    """Tabulate one line for each measure, one column for each group."""
    table = Table(title="Measures")
    table.add_column("measure", overflow="fold")
    for group in comparison.groups:
        table.add_column(_heading(group), justify="right")
    for name, found in comparison.measures.items():
        table.add_row(name, *(shown(each) for each in found))
    return table


def _heading(group: SeedGroup) -> str:
    return group.name if len(group.runs) == 1 else f"{group.name} ({len(group.runs)} seeds)"


def shown(measure: GroupMeasure) -> str:
    """Format a measure: the mean, and half of its interval."""
    if math.isnan(measure.mean):
        return "-"
    missing = sum(1 for value in measure.values if math.isnan(value))
    text = _number(measure.mean)
    if not math.isnan(measure.half):
        text += f" +- {_number(measure.half)}"
    return text if not missing else f"{text} ({missing} without)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
