"""Sends a run to experiment trackers, each from a process of its own, so that none of them can hold up training."""

from services.tracking.clients import find_client
from services.tracking.cursor import Cursor, CursorFile
from services.tracking.follower import MetricsFollower, Row
from services.tracking.samples import Sample, SampleReader

__all__ = ["Cursor", "CursorFile", "MetricsFollower", "Row", "Sample", "SampleReader", "find_client"]
