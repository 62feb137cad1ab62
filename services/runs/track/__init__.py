"""Sends a run to experiment trackers, each from its own process, so that none can delay training."""

from gspo_services.runs.track.clients import find_client
from gspo_services.runs.track.cursor import Cursor, CursorFile
from gspo_services.runs.track.samples import Sample, SampleReader

__all__ = ["Cursor", "CursorFile", "Sample", "SampleReader", "find_client"]
