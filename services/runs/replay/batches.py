"""Recorded batches: read from a ledger, and handed to the learner in its broker's place."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from gspo_protocol.digests import VERSION_KIND, version_kind
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import BatchRequest, EndOfRun, GroupSampling, SkipBatch, Trained, Welcome
from gspo_services.broker.ledger import batch_stats
from gspo_services.broker.rows import BatchRow, GroupRow, TrajectoryRow
from gspo_services.broker.sending import StoredBatch, batch_of_groups, members_of
from gspo_services.broker.store import LEDGER_FILE, Reader, reading, refusing_damage
from gspo_services.learner.broker import Answer, BatchAnnounced, BrokerPort, PartArrived, Publication, ToBroker
from gspo_services.learner.plan import MINI_BATCH_ORDER
from gspo_services.shared.schedules import RunSchedules
from gspo_services.shared.settings import Settings

SAME: Final = "same"
DIFFERENT: Final = "different"
UNKNOWN: Final = "not recorded"
ORDERS: Final = """
SELECT json_extract(line, '$.batch'), json_extract(line, '$.mini_batch_order') FROM metrics_lines
WHERE json_extract(line, '$.event') = 'batch' ORDER BY number
"""


class RecordedRun:
    """What a run's ledger holds for training. ``digests``: those published, by the number of batches trained before."""

    def __init__(self, directory: Path, settings: Settings, *, rescheduled: bool = False) -> None:
        """``rescheduled``: train with what the schedules of ``settings`` give each batch, and not with what was recorded.

        Raises: NoLedger, StoreCorrupt.
        """
        self._directory = directory
        self._part_tokens = settings.broker.batch_part_tokens
        self._with_experts = settings.objective.routing_replay_from == "engine"
        self._schedules = RunSchedules(settings)
        self._rescheduled = rescheduled
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
            self._orders: dict[int, float | None] = dict(connection.execute(ORDERS))
            """By batch that was trained: the learner's ``MINI_BATCH_ORDER``; None: a release that had no such number."""
        self._newest_version = int(newest)
        # A run without a learner has no batches: its groups are taken in their order.
        size = settings.batch.groups_per_batch
        self._unassembled = [tuple(waiting[at : at + size]) for at in range(0, len(waiting) - size + 1, size)]

    @property
    def num_batches(self) -> int:
        """Batches that can be trained: the recorded ones or, if none was assembled, as many as complete groups make."""
        return self.num_assembled or len(self._unassembled)

    def other_kinds_of_digests(self, first: int, end: int) -> list[int]:
        """Kinds of digests of the versions trained on [first, end) that are not this release's: they cannot be compared."""
        found = (digests for trained, digests in self.digests.items() if first < trained <= end)
        return sorted({version_kind(digest) for each in found for digest in each} - {VERSION_KIND})

    def trained_in_another_order(self, first: int, end: int) -> list[int]:
        """Batches of [first, end) whose groups the run's learner did not deal to mini-batches as this release does."""
        return [index for index, order in sorted(self._orders.items()) if first <= index < end and order != MINI_BATCH_ORDER]

    def answers(self, index: int) -> Iterator[Answer]:
        """The batch as the learner received it, part by part, each read when it is asked for; or that it was quarantined.

        Raises: StoreCorrupt when its tokens are not those that were recorded.
        """
        # Where no batch was assembled, each is one version later: it has lag, as it would have with a learner.
        would_be = None if self.num_assembled else self._newest_version + index
        with refusing_damage(self._directory / LEDGER_FILE), reading(self._directory) as connection:
            reader = Reader(self._directory / LEDGER_FILE, connection)
            quarantined = reader.quarantined().get(index)
            if quarantined is not None:
                yield SkipBatch(index=index, reason=quarantined.reason)
                return
            batch = self._batch(reader, index, would_be)
            message, arrays = batch.announcement()
            yield BatchAnnounced(batch=message, arrays=arrays)
            for number in range(batch.num_parts):
                part, arrays = batch.part(number)
                yield PartArrived(part=part, arrays=arrays)

    def _batch(self, reader: Reader, index: int, would_be: int | None) -> StoredBatch:
        row = reader.batch_row(index) if would_be is None else self._would_be(reader, index, would_be)
        if self._rescheduled or would_be is not None:
            row = replace(row, values=self._schedules.training_at(index))
        return batch_of_groups(reader, row, part_tokens=self._part_tokens, with_experts=self._with_experts)

    def _would_be(self, reader: Reader, index: int, version: int) -> BatchRow:
        """Of complete groups that no batch was assembled from."""
        group_ids = self._unassembled[index]
        waiting = [reader.rows(GroupRow, "WHERE group_id = ?", (group_id,))[0] for group_id in group_ids]
        samplings = tuple(group.sampling for group in waiting)
        return _assembled(index, version, group_ids, members_of(reader, group_ids), samplings)


def _assembled(
    index: int,
    version: int,
    group_ids: tuple[int, ...],
    rows: list[TrajectoryRow],
    samplings: tuple[GroupSampling, ...],
) -> BatchRow:
    groups = [[row for row in rows if row.group_id == group_id] for group_id in group_ids]
    stats = batch_stats(version, groups)
    return BatchRow(index=index, policy_version=version, group_ids=group_ids, stats=stats, samplings=samplings)


class RecordedBroker(BrokerPort):
    """Hands recorded batches to a ``LearnerService``, and sets ``stop`` when everything was trained and reported.

    ``report`` is called with each batch's metrics, among them how the published digest compares.
    """

    wants_digests = True

    def __init__(
        self, run: RecordedRun, end: int, metrics: Path, stop: threading.Event, report: Callable[[dict[str, Any]], None]
    ) -> None:
        """``end``: the index after the last batch to train."""
        self._run = run
        self._end = end
        self._metrics = metrics
        self._num_lines = 0
        self._stop = stop
        self._report = report
        self._answers: Iterator[Answer] | None = None
        """Of the batch that was asked for last."""
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
            end = EndOfRun(index=message.index, reason="all recorded batches are trained")
            self._answers = iter([end]) if message.index >= self._end else self._run.answers(message.index)
        elif isinstance(message, Trained):
            self._write(message)

    def take(self, timeout_s: float) -> Answer | None:
        answer = None if self._answers is None else next(self._answers, None)
        if answer is None:
            self._stop.set()  # Everything is trained, and nobody fetches the weights.
        return answer

    def publish(self, publication: Publication) -> None:
        """Compare with what the run published after as many batches."""
        trained = publication.trained_batches
        expected = self._run.digests.get(trained, set()) if self._run.num_assembled or not trained else set()
        self._digest = publication.digest
        self._comparison = UNKNOWN if not expected else SAME if self._digest in expected else DIFFERENT
        self.comparisons[trained] = self._comparison

    def wait_for_room(self) -> None:
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
        self._num_lines += 1
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"line": self._num_lines, **line}) + "\n")
