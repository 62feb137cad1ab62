"""Every number of metrics.jsonl, as columns over the batches: for curves that the user picks."""

import math
from array import array
from collections.abc import Iterable
from typing import Any, Final

from gspo_services.runs.metrics import Row, number, or_none
from gspo_services.runs.reading import MetricsLines

EVENTS: Final = ("batch", "eval", "evaluation")
NOT_MEASURES: Final = ("line", "batch", "policy_version", "time")
"""In each line; those of a batch's own line are measures all the same."""
MOST_NAMES: Final = 4096
"""Of numbers; a run has some hundred."""


class MetricColumns:
    """Columns of what was read so far: 16 bytes a number. Nothing is read before somebody asks for a column."""

    def __init__(self) -> None:
        self._last = 0
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        """By name: batches and values, in the order of the lines."""

    def read(self, lines: MetricsLines) -> None:
        """Add what is new in the ledger. Raises: StoreCorrupt."""
        if lines.last < self._last:
            # Another run has the directory now, or this one stands as it did before.
            self.__init__()  # type: ignore[misc]
        self.take(lines.after(self._last, *EVENTS))
        self._last = lines.last

    def take(self, rows: Iterable[Row]) -> None:
        """Add lines that were not added yet."""
        for row in rows:
            batch = row.get("batch")
            if row.get("event") not in EVENTS or type(batch) is not int:
                continue
            left_out = NOT_MEASURES[:2] if row["event"] == "batch" else NOT_MEASURES
            for name in row:
                if name in left_out or math.isnan(value := number(row, name)):
                    continue
                if name not in self._columns:
                    if len(self._columns) >= MOST_NAMES:
                        continue
                    self._columns[name] = array("q"), array("d")
                batches, values = self._columns[name]
                batches.append(batch)
                values.append(value)

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return sorted(self._columns)

    def plain(self, name: str, first: float, last: float, most: int) -> dict[str, Any]:
        """Return a column between two batches, with at most ``most`` points: means of neighbours if there are more.
        Of a batch that was trained again, the last training counts. An unknown name has no points."""
        known = dict(zip(*self._columns.get(name, ((), ())), strict=True))
        batches = sorted(each for each in known if first <= each <= last)
        width = max(1, math.ceil(len(batches) / most))
        bins = [batches[at : at + width] for at in range(0, len(batches), width)]
        means = [math.fsum(known[batch] for batch in each) / len(each) for each in bins]
        return {"name": name, "batch": [each[0] for each in bins], "values": [or_none(mean) for mean in means]}
