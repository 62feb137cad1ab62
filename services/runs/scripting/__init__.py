"""Runs from Python, as ``gspo.runs`` gives them to scripts and notebooks."""

from services.runs.scripting.events import BatchMetrics, RunEvent
from services.runs.scripting.run import RunFailed, TrainingRun

__all__ = ["BatchMetrics", "RunEvent", "RunFailed", "TrainingRun"]
