"""What ``gspo`` needs from a tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo_services.runs.track.points import Point
from gspo_services.runs.track.samples import SampleTable


@dataclass(frozen=True, kw_only=True)
class TrackerRun:
    """What a tracker is told about a run."""

    name: str
    """The run's unique name there."""
    project: str
    directory: Path
    """The run's own id."""
    settings: Mapping[str, str | float | bool]
    """Settings by section.key."""
    code: Mapping[str, str]
    """Release and commit of what runs."""
    begins: bool
    """Nothing was sent to it before."""


class Tracker(Protocol):
    """One run at one tracker. Every method may raise what the tracker's client raises, and may hang."""

    def last_line(self) -> int | None:
        """The last line of metrics.jsonl that the tracker has for good; None when only the cursor knows."""

    def write(self, point: Point, samples: SampleTable | None) -> None:
        """Send a whole point or nothing. ``samples``: the model's answers at that point, if wanted."""

    def flush(self) -> None:
        """Return when everything written survives this process."""

    def close(self) -> None:
        """Flush and let go. ``last_line`` and ``write`` are not called after it."""
