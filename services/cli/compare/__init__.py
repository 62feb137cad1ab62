"""``gspo compare``: compares runs as a table, a picture or JSON."""

from gspo_services.cli.compare.command import compare_command

__all__ = ["compare_command"]
