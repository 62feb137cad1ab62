"""Estimates from metrics.jsonl when a run will end, how long its answers are, and which evaluation was best."""

import math
from collections.abc import Sequence
from typing import Any

from gspo_services.runs.metrics import BatchPace, HeldOut, Row, best_evaluation, held_out, number


class RunProgress:
    """Learns from rows in their order."""

    def __init__(self) -> None:
        self.best: HeldOut | None = None
        """The evaluation with the highest reward."""
        self.last_batch: Row = {}
        self._pace = BatchPace()

    def take(self, rows: Sequence[Row]) -> None:
        """Learn from new rows."""
        for row in rows:
            if row["event"] == "batch":
                self.last_batch = row
                self._pace.take(row["batch"], number(row, "time_s"))
            elif row["event"] == "eval":
                found = filter(None, (self.best, held_out(row)))
                self.best = best_evaluation(found, lambda each: each.reward)

    def seconds_left(self, status: dict[str, Any]) -> float | None:
        """Estimate how long the remaining batches take at the present rate; None before the third batch."""
        return self._pace.seconds_left(status["batches_total"] - status["batches_trained"])

    def lengths(self) -> str:
        """Return the lengths of the last batch's answers; empty before the first."""
        average, p95, longest, cut_off = (
            number(self.last_batch, f"length/{name}") for name in ("mean", "p95", "max", "cut_off")
        )
        if math.isnan(average):
            return ""
        return f"{average:.0f} mean, {p95:.0f} p95, {longest:.0f} longest; {100 * cut_off:.0f} % cut off"


def pass_rates(batch: Row) -> str:
    """Return the last batch's pass rates by how often its tasks were solved before; empty if unknown."""
    found = [(name, number(batch, f"pass_rate/{name}")) for name in ("new", "never", "seldom", "often", "always")]
    return ", ".join(f"{name} {100 * rate:.0f} %" for name, rate in found if not math.isnan(rate))


def duration(seconds: float) -> str:
    """Format a duration in the unit that people would use."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
