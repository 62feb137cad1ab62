"""Lines of metrics.jsonl: from the ledger, or from the file where there is no ledger to read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.broker.store import Reader

Line = dict[str, Any]
"""An event with "event", "record" (its number), "time" (seconds since 1970) and "time_s" (since the broker began)."""

PAGE: Final = 256


class MetricsLines:
    """The lines as the ledger has them, in order. Each is one of these events:

    batch (trained: rewards, lag, the loss's diagnostics), eval, dropped, set_aside, released, batch_skipped.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def last(self) -> int:
        """The number of the last one; 0 without any."""
        return self._reader.number("SELECT max(record) FROM records")

    def after(self, record: int = 0, *events: str) -> Iterator[Line]:
        """The lines after number ``record``; of those, the ones of these events, or all. Raises: StoreCorrupt."""
        last = self.last
        while record < last:
            for line in self._reader.metrics_after(record, record + PAGE):
                if not events or line.get("event") in events:
                    yield line
            record += PAGE

    def batches(self) -> Iterator[Line]:
        """One line per batch, by index: the last one where a batch was trained again. Raises: StoreCorrupt."""
        found: dict[int, int] = {}
        for line in self.after(0, "batch"):
            found[line["batch"]] = line["record"]
        for record in (found[index] for index in sorted(found)):
            yield from self._reader.metrics_after(record - 1, record)


def read_lines(directory: Path) -> Iterator[Line]:
    """The whole lines of ``directory``'s metrics.jsonl, for a run whose ledger is lost or of another release. Lines that
    are no JSON objects are left out. Raises: OSError."""
    with (directory / METRICS_FILE).open("rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line
