"""How long a batch takes now, from which follows when a run will end."""

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Final

RECENT: Final = 20
"""Batches whose times say how long the next ones will take."""


class BatchPace:
    """Learns from batches in the order in which they were trained."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def take(self, batch: int, time_s: float) -> None:
        """Learn from a batch that was trained ``time_s`` after the run began, seconds; NaN: unknown."""
        if not math.isnan(time_s):
            self._times.append((batch, time_s))

    def seconds_left(self, batches: int) -> float | None:
        """Estimate how long ``batches`` more take; None before the third batch, and when none are left."""
        steps = [
            later[1] - earlier[1]
            for earlier, later in pairwise(self._times)
            # The time of a batch that is trained again after a restart measures the restart.
            if later[0] == earlier[0] + 1 and later[1] >= earlier[1]
        ]
        return median(steps) * batches if len(steps) >= 2 and batches > 0 else None
