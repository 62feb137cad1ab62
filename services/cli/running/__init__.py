"""``gspo run`` and ``gspo record``: processes on this machine, with live progress and a report."""

from services.cli.running.command import run_command
from services.cli.running.recording import record_command
from services.cli.running.report import summary_table, write_plot
from services.cli.running.supervisor import FINAL_EVENTS, last_error

__all__ = ["FINAL_EVENTS", "last_error", "record_command", "run_command", "summary_table", "write_plot"]
