"""Recorded batches: read from a ledger, and handed to the learner in its broker's place."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from protocol.limits import PROTOCOL_VERSION
from protocol.messages import BatchRequest, EndOfRun, SkipBatch, Trained, Welcome
from services.broker.ledger import batch_stats
from services.broker.outgoing import batch_message
from services.broker.rows import BatchRow, TrajectoryRow
from services.broker.store import LEDGER_FILE, Reader, reading, refusing_damage
from services.learner.broker import Answer, BatchArrived, BrokerPort, ToBroker
from services.learner.weights import WeightCopy, build_snapshot
from services.runtime.settings import Settings

SAME: Final = "same"
DIFFERENT: Final = "different"
UNKNOWN: Final = "not recorded"


class RecordedRun:
    """What a run's ledger holds for training. ``digests``: those published, by the number of batches trained before."""

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
        # A recording made without a learner has no batches: its groups are taken in their order.
        self._unassembled = [tuple(waiting[at : at + size]) for at in range(0, len(waiting) - size + 1, size)]

    @property
    def num_batches(self) -> int:
        """Batches that can be trained: the recorded ones or, if none was assembled, as many as complete groups make."""
        return self.num_assembled or len(self._unassembled)

    def batch(self, index: int) -> BatchArrived | SkipBatch:
        """The batch as the learner received it, or that it was set aside.

        Raises: StoreCorrupt when its tokens are not those that were recorded.
        """
        with refusing_damage(self._directory / LEDGER_FILE), reading(self._directory) as connection:
            reader = Reader(self._directory / LEDGER_FILE, connection)
            set_aside = reader.set_aside().get(index)
            if set_aside is not None:
                return SkipBatch(index=index, reason=set_aside.reason)
            if self.num_assembled:
                row, items = reader.batch(index)
            else:
                group_ids = self._unassembled[index]
                items = reader.members(group_ids)
                # Each batch is one version later: it has lag, as it would have with a learner.
                row = _assembled(index, self._newest + index, group_ids, [trajectory for trajectory, _ in items])
            message, arrays = batch_message(row, items, self._temperature)
        return BatchArrived(batch=message, arrays=arrays)


def _assembled(index: int, version: int, group_ids: tuple[int, ...], rows: list[TrajectoryRow]) -> BatchRow:
    groups = [[row for row in rows if row.group_id == group_id] for group_id in group_ids]
    return BatchRow(index=index, policy_version=version, group_ids=group_ids, stats=batch_stats(version, groups))


class RecordedBroker(BrokerPort):
    """Hands recorded batches to a ``LearnerService``, and sets ``stop`` when everything was trained and reported.

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
        """By the number of batches that the weights were trained on."""

    @property
    def reason_to_wait(self) -> str:
        return "nothing: batches are read from the ledger"

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return Welcome(protocol_version=PROTOCOL_VERSION, run_id="replay", policy_version=0)

    def tell(self, message: ToBroker) -> None:
        if isinstance(message, BatchRequest):
            self._wanted = message.index
        elif isinstance(message, Trained):
            self._write(message)

    def take(self, timeout_s: float) -> Answer | None:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            self._stop.set()  # Everything is trained, and nobody fetches the weights.
            return None
        if wanted >= self._end:
            return EndOfRun(index=wanted, reason="all recorded batches are trained")
        return self._run.batch(wanted)

    def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
    ) -> None:
        """Compare with what the run published after as many batches."""
        expected = self._run.digests.get(trained_batches, set()) if self._run.num_assembled or not trained_batches else set()
        self._digest = build_snapshot(policy_version, weights).manifest.digest
        self._comparison = UNKNOWN if not expected else SAME if self._digest in expected else DIFFERENT
        self.comparisons[trained_batches] = self._comparison

    def wait_announced(self) -> None:
        """Nothing is left for later."""

    def acknowledged(self, next_batch: int) -> bool:
        return True

    def flush(self, timeout_s: float) -> bool:
        return True

    def _write(self, trained: Trained) -> None:
        if trained.skipped:
            line: dict[str, Any] = {"event": "batch_skipped", "batch": trained.index}
            self._append(line | {"weights_digest": self._digest, "weights": self._comparison})
            return
        line = {"event": "batch", **trained.metrics, "batch": trained.index, "policy_version": trained.policy_version}
        line |= {"weights_digest": self._digest, "weights": self._comparison}
        self._append(line)
        self._report(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
