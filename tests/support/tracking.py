"""A tracker that keeps its points in a list."""

import json
from pathlib import Path

from gspo_services.runs.track.points import Point
from gspo_services.runs.track.samples import SampleTable


class ListTracker:
    """Keeps points in a list; ``fails`` raises at the n-th write, once."""

    def __init__(self, points: list[Point], *, knows: bool = True, fails_at: int | None = None) -> None:
        self.points = points
        self._knows = knows
        self.fails_at = fails_at
        self.closed = 0

    def last_line(self) -> int | None:
        return max((point.line for point in self.points), default=0) if self._knows else None

    def write(self, point: Point, samples: SampleTable | None) -> None:
        if self.fails_at is not None and len(self.points) >= self.fails_at:
            self.fails_at = None
            raise ConnectionError("the server is gone")
        self.points.append(point)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def write_rows(directory: Path, num_batches: int, first: int = 0) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        for batch in range(first, num_batches):
            row = {"line": batch + 1, "event": "batch", "batch": batch, "loss": batch / 4, "time": 1.0, "time_s": 1.0}
            file.write(json.dumps(row) + "\n")
