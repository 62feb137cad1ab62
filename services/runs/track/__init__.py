"""Sends a run to experiment trackers, each from a process of its own, so that none of them can hold up training."""

from gspo_services.runs.track.clients import find_client
from gspo_services.runs.track.cursor import Cursor, CursorFile
from gspo_services.runs.track.samples import Sample, SampleReader

__all__ = ["Cursor", "CursorFile", "Sample", "SampleReader", "find_client"]
