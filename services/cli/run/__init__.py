"""``gspo run``, ``gspo record`` and ``gspo plot``: processes on this machine, with live progress and a report."""

from services.cli.run.command import run_command
from services.cli.run.display import Look
from services.cli.run.plot import DPI, STYLE, colour_of, write_plot
from services.cli.run.ports import can_bind, port_ranges
from services.cli.run.recording import record_command
from services.cli.run.report import summary_table
from services.cli.run.supervisor import FINAL_EVENTS, last_error

__all__ = [
    "DPI",
    "FINAL_EVENTS",
    "STYLE",
    "Look",
    "can_bind",
    "colour_of",
    "last_error",
    "port_ranges",
    "record_command",
    "run_command",
    "summary_table",
    "write_plot",
]
