"""Recorded batches as a learner's link hands them over: read from a ledger, one after the other."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from protocol.limits import PROTOCOL_VERSION
from protocol.messages import EndOfRun, Welcome
from services.broker.ledger import batch_stats
from services.broker.outgoing import batch_message
from services.broker.rows import BatchRow, TrajectoryRow
from services.broker.store import LEDGER_FILE, Reader, reading, refusing_damage
from services.learner.broker import BatchArrived
from services.learner.weights import WeightCopy, build_snapshot
from services.runtime.settings import Settings

SAME: Final = "same"
DIFFERENT: Final = "different"
UNKNOWN: Final = "not recorded"


class RecordedRun:
    """What a run's ledger holds for training. ``digests``: those published, by how many batches they were trained on."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Raises: NoLedger, StoreCorrupt."""
        self._directory = directory
        self._temperature = settings.sampling.temperature
        size = settings.batch.groups_per_batch
        self.digests: dict[int, set[str]] = {}
        with refusing_damage(directory / LEDGER_FILE), reading(directory) as connection:
            for trained_batches, digest in connection.execute("SELECT trained_batches, digest FROM versions"):
                self.digests.setdefault(trained_batches, set()).add(digest)
            self.num_assembled = int(connection.execute("SELECT count(*) FROM batches").fetchone()[0])
            newest = connection.execute("SELECT coalesce(max(policy_version), 0) FROM versions").fetchone()[0]
            complete = connection.execute(
                "SELECT group_id FROM groups WHERE split = 'train' AND status = 'complete' ORDER BY group_id"
            )
            waiting = [group_id for (group_id,) in complete]
        self._newest = int(newest)
        # A recording without a learner has no batches: its groups are taken in their order.
        self._unassembled = [tuple(waiting[at : at + size]) for at in range(0, len(waiting) - size + 1, size)]

    @property
    def num_batches(self) -> int:
        """Batches that can be trained: as recorded, or, where none was ever assembled, of complete groups."""
        return self.num_assembled or len(self._unassembled)

    def batch(self, index: int) -> BatchArrived:
        """As the learner was given it. Raises: StoreCorrupt when its tokens are not what was recorded."""
        with refusing_damage(self._directory / LEDGER_FILE), reading(self._directory) as connection:
            reader = Reader(self._directory / LEDGER_FILE, connection)
            if self.num_assembled:
                row, items = reader.batch(index)
            else:
                group_ids = self._unassembled[index]
                items = reader.members(group_ids)
                # Each batch is trained one version later: with lag, as it would be with a learner.
                row = _assembled(index, self._newest + index, group_ids, [trajectory for trajectory, _ in items])
            message, arrays = batch_message(row, items, self._temperature)
        return BatchArrived(batch=message, arrays=arrays)


def _assembled(index: int, version: int, group_ids: tuple[int, ...], rows: list[TrajectoryRow]) -> BatchRow:
    groups = [[row for row in rows if row.group_id == group_id] for group_id in group_ids]
    return BatchRow(index=index, policy_version=version, group_ids=group_ids, stats=batch_stats(version, groups))


class RecordedBroker:
    """What a `LearnerService` has instead of a broker. It sets ``stop`` when everything was trained and reported.

    ``report`` is called with each batch's metrics, among them how the published digest compares.
    """

    def __init__(
        self, run: RecordedRun, end: int, record: Path, stop: threading.Event, report: Callable[[dict[str, Any]], None]
    ) -> None:
        """``end``: the index after the last batch to train."""
        self._run = run
        self._end = end
        self._record = record
        self._stop = stop
        self._report = report
        self._wanted: int | None = None
        self._comparison = UNKNOWN
        self._digest = ""
        self.comparisons: dict[int, str] = {}
        """By how many batches the weights were trained on."""

    @property
    def waiting_for(self) -> str:
        return "nothing: batches are read from the ledger"

    @property
    def refused(self) -> str:
        return ""

    @property
    def encoding(self) -> bool:
        return False

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return Welcome(protocol_version=PROTOCOL_VERSION, run_id="replay", policy_version=0)

    def resume(self, next_batch: int) -> None:
        """There is nobody to tell."""

    def request(self, index: int, policy_version: int) -> None:
        self._wanted = index

    def take(self, timeout_s: float) -> BatchArrived | EndOfRun | None:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            self._stop.set()  # Everything is trained, and nobody fetches the weights.
            return None
        if wanted >= self._end:
            return EndOfRun(index=wanted, reason="all recorded batches are trained")
        return self._run.batch(wanted)

    def wait_announced(self) -> None:
        """Nothing is left for later."""

    def publish(self, policy_version: int, weights: WeightCopy, trained_batches: int) -> None:
        """Compare with what the run has published after as many batches."""
        expected = self._run.digests.get(trained_batches, set()) if self._run.num_assembled or not trained_batches else set()
        self._digest = build_snapshot(policy_version, weights).manifest.digest
        self._comparison = UNKNOWN if not expected else SAME if self._digest in expected else DIFFERENT
        self.comparisons[trained_batches] = self._comparison

    def trained(self, index: int, policy_version: int, metrics: dict[str, float | None]) -> None:
        line = {"event": "batch", **metrics, "batch": index, "policy_version": policy_version}
        line |= {"weights_digest": self._digest, "weights": self._comparison}
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._report(line)

    def mark(self) -> int:
        return 0

    def acknowledged(self, mark: int) -> bool:
        return True

    def checkpointed(self, next_batch: int, policy_version: int) -> None:
        """There is nobody to tell."""

    def flush(self, timeout_s: float) -> bool:
        return True
