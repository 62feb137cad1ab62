"""``gspo data``: a run's training tasks."""

from services.cli.data.adding import data_command

__all__ = ["data_command"]
