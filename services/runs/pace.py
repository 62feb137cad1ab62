"""What a run waits for, from the times of its last batches: for samples, or for the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

LEAST_BATCHES: Final = 4
WORTH_SAYING: Final = 0.1
"""Of a batch's time: below that, publishing is not what makes the run slow."""
NEVER_WAITS: Final = 0.93
"""A learner that works so much of the time makes the run wait: a tenth of a batch's time is between batches anyway."""


@dataclass(frozen=True)
class RecentPace:
    """The last batches of a run."""

    seconds: float
    """Of one batch."""
    learner_s: float
    """Of these, training and publishing."""
    announcing_s: float = 0.0
    """Of the learner's, the wait until the version before is announced."""

    @property
    def working(self) -> float:
        """The learner's share of the time."""
        return min(1.0, self.learner_s / self.seconds)

    def advice(self, *, max_lag: int) -> str:
        """Say what would make the run faster, and by how much at most."""
        said = f"a batch takes {self.seconds:.1f} s, and the learner works {self.working:.0%} of it: "
        if self.announcing_s >= WORTH_SAYING * self.seconds:
            return (
                f"{said}for {self.announcing_s:.1f} s of them it waits until all ranks have encoded the version before. "
                "Publishing bounds the run: more ranks share it, and with more updates a version "
                "(batch.mini_batches) there are fewer of them"
            )
        if self.working >= NEVER_WAITS:
            return (
                f"{said}samples are there before it asks. Only a faster learner makes this run faster: more ranks or GPUs, "
                "or without a GPU learner.threads, where cores are idle"
            )
        most = f"at most {1 / self.working:.1f} times"
        if max_lag == 0:
            return f"{said}with batch.max_lag = 0 it and the rollouts take turns. With 1 the run would be faster, {most}"
        return f"{said}else it waits for samples. More or faster rollouts make this run faster, {most}; more ranks do not"


def pace_of(rows: Sequence[Mapping[str, Any]]) -> RecentPace | None:
    """Return the pace of batches, rows of metrics.jsonl in their order.

    None for too few, where they were not in a row, and for rows that somebody else has written.
    """
    values = [[row.get(name) for name in ("batch", "time_s", "train_s", "publish_s")] for row in rows]
    if len(rows) < LEAST_BATCHES or not all(isinstance(value, int | float) for each in values for value in each):
        return None
    table = np.array(values, dtype=np.float64)
    number = len(rows) - 1
    seconds = float(table[-1, 1] - table[0, 1]) / number
    learner_s = float(table[1:, 2:].sum()) / number
    in_a_row = bool((np.diff(table[:, 0]) == 1).all())
    if not (in_a_row and np.isfinite(table).all() and seconds > 0 and learner_s > 0):
        return None
    # Runs of older releases have no such column.
    waits = [float(row.get("publish_wait_s") or 0.0) for row in rows[1:]]
    return RecentPace(seconds, learner_s, announcing_s=sum(waits) / number)
