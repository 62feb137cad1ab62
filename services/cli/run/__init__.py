"""``gspo run``, ``gspo generate`` and ``gspo plot``: processes on this machine, with live progress and a report."""

from gspo_services.cli.run.command import run_command
from gspo_services.cli.run.display import Look
from gspo_services.cli.run.generation import generate_command
from gspo_services.cli.run.plot import write_plot
from gspo_services.cli.run.report import summary_table
from gspo_services.cli.run.supervisor import FINAL_EVENTS, last_error

__all__ = [
    "FINAL_EVENTS",
    "Look",
    "generate_command",
    "last_error",
    "run_command",
    "summary_table",
    "write_plot",
]
