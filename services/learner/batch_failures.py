"""What the learner says, before it ends, about the batch that it could not train: the broker quarantines one that is named
again and again (docs/guide/learner.md).

One rank's error is a lost rank for the others, and only rank 0 talks to the broker. So another rank leaves a note in the
run's directory before it ends, and rank 0 looks for it when a collective fails: the note is there before the connection
breaks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from gspo_protocol.messages import BatchFailed
from gspo_services.learner.broker import BrokerPort
from gspo_services.learner.engine import MissingGradientError
from gspo_services.learner.first_look import OtherPolicyError
from gspo_services.learner.lost_rank import LostRankError, means_lost_rank
from gspo_services.learner.teacher import TeacherError

log = structlog.get_logger()

MAX_TEXT: Final = 1024
REPORT_S: Final = 10.0
"""How long the report may wait for the broker's acknowledgement. Without one, the end counts as unreported."""
NOTE: Final = "batch-failed-rank-{rank}.json"
NOTES: Final = NOTE.format(rank="*")


class _Note(msgspec.Struct):
    index: int
    reason: str


class BatchFailures:
    """Watches the training of batches on one rank."""

    def __init__(self, broker: BrokerPort, directory: Path, *, rank: int) -> None:
        self._broker = broker
        self._directory = directory
        self._rank = rank

    def begin(self) -> None:
        """Remove what an earlier life has left."""
        if self._rank == 0:
            self._take_note(None)

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Train batch ``index`` inside the block. Errors are reported and raised again."""
        try:
            yield
        except (MissingGradientError, OtherPolicyError, TeacherError):
            raise  # A fault of the model, the engines, or of the teacher, which may be away: every batch would show it.
        except Exception as error:
            try:
                self._report(index, error)
            # A failure to report must not hide the failure of training.
            except Exception as unsaid:  # noqa: BLE001
                log.error("batch_failure_not_reported", batch=index, error=f"{type(unsaid).__name__}: {unsaid}")
            raise

    def _report(self, index: int, error: Exception) -> None:
        lost = isinstance(error, LostRankError) or means_lost_rank(error)
        reason = f"{type(error).__name__}: {error}"[:MAX_TEXT]
        if self._rank > 0:
            if not lost:
                self._leave_note(_Note(index=index, reason=reason))
            return
        noted = self._take_note(index) if lost else None
        if noted is not None:
            lost, reason = False, noted.reason
        log.error("batch_failed", batch=index, reason=reason, lost_rank=lost)
        self._broker.tell(BatchFailed(index=index, reason=reason, raised=not lost))
        if not self._broker.flush(REPORT_S):
            log.error("batch_failure_not_reported", batch=index, error="the broker did not acknowledge it")

    def _leave_note(self, note: _Note) -> None:
        path = self._directory / NOTE.format(rank=self._rank)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(note))
        part.rename(path)

    def _take_note(self, index: int | None) -> _Note | None:
        """Return another rank's note on batch ``index``, and remove all notes."""
        found = None
        for path in sorted(self._directory.glob(NOTES)):
            try:
                note = msgspec.json.decode(path.read_bytes(), type=_Note)
            except msgspec.MsgspecError:
                note = None
            path.unlink(missing_ok=True)
            if note is not None and note.index == index:
                found = note
        return found
