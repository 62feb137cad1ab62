"""Lines of metrics.jsonl as the ledger has them."""

from collections.abc import Iterator
from typing import Final

from gspo_services.broker.store import Reader
from gspo_services.runs.metrics import Row

PAGE: Final = 256


class MetricsLines:
    """The lines in order. Each is one of these events:

    batch (trained: rewards, lag, the loss's diagnostics), eval, dropped, quarantined, requeued, batch_skipped.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def last(self) -> int:
        """The number of the last one; 0 without any."""
        return self._reader.number("SELECT max(number) FROM metrics_lines")

    def after(self, number: int = 0, *events: str) -> Iterator[Row]:
        """The lines after number ``number``; of those, the ones of these events, or all. Raises: StoreCorrupt."""
        last = self.last
        while number < last:
            for line in self._reader.metrics_after(number, number + PAGE):
                if not events or line.get("event") in events:
                    yield line
            number += PAGE
