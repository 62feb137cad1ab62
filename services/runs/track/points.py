"""Rows of metrics.jsonl as points for a tracker: one for each batch and each evaluation, at its batch.

Other rows (drops, batches quarantined) become counts, which the next batch's point carries: a tracker has one value of each
measure at each step.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from gspo_services.runs.metrics import Row, number
from gspo_services.runs.track.names import tracker_names, usable

COUNTED: Final = ("dropped", "quarantined", "batch_skipped", "requeued")
LINE: Final = "progress/line"
"""The number of the last line of metrics.jsonl that a tracker has: so it can be asked where to go on."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a tracker is sent at once."""

    line: int
    event: str
    """batch, eval, or evaluation (of a named set)."""
    batch: int
    """The step. An evaluation's step is the number of batches that its weights were trained on."""
    time: float
    """Seconds since 1970."""
    values: dict[str, float]


class Translation:
    """Turns the rows of one run into points; rows must come in order, from the first one."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def point(self, row: Row) -> Point | None:
        """Return the point of a row; None for a row that is only counted, and for a batch that was trained again: its first
        training stays, so that no step is doubled.
        """
        event = row.get("event")
        if event not in ("batch", "eval", "evaluation"):
            self._count(str(event), row)
            return None
        batch, line = row["batch"], row["line"]
        kind = f"evaluation/{row.get('set')}" if event == "evaluation" else event
        if batch <= self._last.get(kind, -1):
            self._counts["events/trained_again"] += event == "batch"
            return None
        self._last[kind] = batch
        # What is not the set's own, such as the version, would come twice if several sets are evaluated.
        keys = [key for key in row if event != "evaluation" or key.startswith("eval/")]
        measures = {name: number(row, key) for key, name in tracker_names(keys, event).items()}
        # None: there was nothing to compute this measure from.
        values = {name: value for name, value in measures.items() if not math.isnan(value)}
        if event == "batch":
            values |= {name: float(number) for name, number in self._counts.items()}
        values[LINE] = float(line)
        at = 0.0 if math.isnan(time := number(row, "time")) else time
        return Point(line=line, event=event, batch=batch, time=at, values=values)

    def _count(self, event: str, row: Row) -> None:
        if event not in COUNTED:
            return
        self._counts[f"events/{event}"] += 1
        if event == "dropped":
            self._counts[usable(f"events/dropped_{row.get('reason')}")] += 1
