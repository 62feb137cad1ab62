"""Runs from Python: ``gspo.runs`` offers them to scripts and notebooks."""

from gspo_services.runs.scripting.run import RunFailed, TrainingRun

__all__ = ["RunFailed", "TrainingRun"]
