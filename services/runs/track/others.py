"""What the other brokers of a run have dropped or quarantined, batch by batch.

Batches and evaluations are complete in broker 0's metrics.jsonl. What another broker gave up is in its own file.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from gspo_services.broker.metrics_file import METRICS_FILE
from gspo_services.runs.ledgers import other_ledgers
from gspo_services.runs.metrics import MetricsFollower, Row


class OtherBrokers:
    """Follows the metrics.jsonl of every broker but the first."""

    def __init__(self, directory: Path) -> None:
        """``directory`` is the run's."""
        self._directory = directory
        self._files: list[_Lines] | None = None

    def until(self, batch: int) -> Iterator[Row]:
        """Yield the further rows up to this batch's own, of all brokers. Rows not yet written come with a later batch.

        Raises: OSError other than for a missing file.
        """
        if self._files is None:
            # Only now: a run that has trained a batch has written its settings.
            self._files = [_Lines(each / METRICS_FILE) for each in other_ledgers(self._directory)]
        for file in self._files:
            yield from file.until(batch)

    def tell_damage(self, tell: Callable[[str], None]) -> None:
        """Report each file's damage once."""
        for file in self._files or ():
            file.follower.tell_damage(tell)


class _Lines:
    def __init__(self, path: Path) -> None:
        self.follower = MetricsFollower(path)
        self._read: deque[Row] = deque()

    def until(self, batch: int) -> Iterator[Row]:
        while self._read or self._read_on():
            index = self._read[0]["batch"] if self._read[0]["event"] == "batch" else None
            if index is not None and index > batch:
                return
            yield self._read.popleft()
            if index == batch:
                return

    def _read_on(self) -> bool:
        self._read.extend(self.follower.read())
        return bool(self._read)
