"""Reads a run's files as typed rows, of a live or an ended run: nothing is written, and nothing is loaded as a whole."""

from gspo_services.runs.reading.lines import MetricsLines
from gspo_services.runs.reading.process_log import ProcessEvent, process_events
from gspo_services.runs.reading.rows import (
    RecordedBatch,
    RecordedChunk,
    RecordedGroup,
    RecordedLease,
    RecordedTokens,
    RecordedTrajectory,
    RunFacts,
)
from gspo_services.runs.reading.run_files import OpenRun, open_run

__all__ = [
    "MetricsLines",
    "OpenRun",
    "ProcessEvent",
    "RecordedBatch",
    "RecordedChunk",
    "RecordedGroup",
    "RecordedLease",
    "RecordedTokens",
    "RecordedTrajectory",
    "RunFacts",
    "open_run",
    "process_events",
]
