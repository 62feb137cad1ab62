"""``gspo compare``: runs beside each other, as a table, a picture or JSON."""

from services.cli.compare.command import compare_command

__all__ = ["compare_command"]
