"""Runs from Python, as ``gspo_services.runs`` gives them to scripts and notebooks."""

from gspo_services.runs.scripting.run import RunFailed, TrainingRun

__all__ = ["RunFailed", "TrainingRun"]
