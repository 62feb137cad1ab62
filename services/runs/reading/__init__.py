"""Reads a run's files as typed records, of a live or an ended run: nothing is written, and nothing is loaded as a whole."""

from gspo_services.runs.reading.lines import MetricsLines
from gspo_services.runs.reading.process_log import ProcessEvent, process_events
from gspo_services.runs.reading.records import (
    RecordedBatch,
    RecordedChunk,
    RecordedGroup,
    RecordedLease,
    RecordedTokens,
    RecordedTrajectory,
    RunFacts,
)
from gspo_services.runs.reading.run_files import OpenRun
from gspo_services.runs.reading.shared_run import SharedRun, open_run

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
    "SharedRun",
    "open_run",
    "process_events",
]
