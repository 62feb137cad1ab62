"""The training loop's interface to the broker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gspo_protocol.codec import Array
from gspo_protocol.messages import (
    Batch,
    BatchFailed,
    BatchPart,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Evaluated,
    LedgerCommit,
    Resume,
    SkipBatch,
    Trained,
    Welcome,
)
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.weights import WeightCopy


@dataclass(frozen=True, kw_only=True)
class BatchAnnounced:
    """What a batch consists of. Its parts follow in order; a SkipBatch in place of one means that none follows."""

    batch: Batch
    arrays: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class PartArrived:
    """The next part of the batch that was announced."""

    part: BatchPart
    arrays: dict[str, Array]


Answer = BatchAnnounced | PartArrived | SkipBatch | EndOfRun
"""A batch in parts, an order to skip it, or the end of the run."""


def updated_scores(scores: Mapping[int, float | None], news: Evaluated) -> Mapping[int, float | None]:
    """``scores`` with ``news``: the mean reward by policy version, None while it is evaluated. A version of which no task
    finished has no score."""
    found = dict(scores)
    for score in news.scores:
        if score.under_way or score.reward is not None:
            found[score.policy_version] = None if score.under_way else score.reward
        else:
            found.pop(score.policy_version, None)
    return found


ToBroker = Resume | BatchRequest | Trained | BatchFailed | Checkpointed


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A version that is to be served and announced."""

    policy_version: int
    weights: WeightCopy
    trained_batches: int
    vocabulary: int
    """How many token ids the model has."""
    note_digest: Callable[[str], None]
    """Called with the weights' digest before anybody can fetch them, perhaps in another thread."""
    experts: ModelExperts | None = None
    """What the model's engines report if they are asked to: the broker takes no others."""
    is_part: bool = False
    """The weights are this rank's part of the version, and the other ranks publish theirs."""
    digest: str = ""
    """The version's, if the broker wants it (``BrokerPort.wants_digests``)."""


class BrokerPort(ABC):
    """A rank's broker: rank 0's is connected (``BrokerThread``) or stands in for a connected one, the other ranks have
    ``NoBroker``. Its methods block."""

    wants_digests: bool = False
    """Whether versions have to have their digest before they are published, at a collective for each."""

    @property
    @abstractmethod
    def reason_to_wait(self) -> str:
        """Why no Welcome or batch has arrived: the broker refuses the learner, is silent, or waits for groups itself."""

    @abstractmethod
    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """Wait for the broker's Welcome; None when it did not come in time."""

    def commit(self) -> LedgerCommit | None:
        """Return the newest commit of the broker's ledger that this learner was told of: what it has trained is in that
        past. None: of none."""
        return None

    @abstractmethod
    def tell(self, message: ToBroker) -> None:
        """Send ``message``. Waits while the broker acknowledges nothing. Raises: ServiceError when that lasts.

        A BatchRequest is repeated until its answer arrives. A Trained follows the version that its batch made. Each new
        handshake is followed by a Resume with the position that the last Resume or Checkpointed named.
        """

    @abstractmethod
    def take(self, timeout_s: float) -> Answer | None:
        """Return what comes next in answer to the last BatchRequest: what the batch consists of, then its parts in order;
        None when it did not come in time. Not more than a few parts come before the first of them is taken.
        """

    def scores(self) -> Mapping[int, float | None]:
        """Return how versions did on the held-out tasks, as far as the broker has said: the mean reward, or None while a
        version is evaluated. Empty without evaluations.
        """
        return {}

    @abstractmethod
    def publish(self, publication: Publication) -> None:
        """Serve the weights (and use them up), then announce the version: rollouts can fetch every announced version.
        Returns before all that. A later call raises what goes wrong.
        """

    @abstractmethod
    def wait_for_room(self) -> None:
        """Wait until no publication is running, and let go of the oldest version that is served: there is room for a copy
        of the weights then."""

    @abstractmethod
    def acknowledged(self, next_batch: int) -> bool:
        """Return whether the broker acknowledged the reports of all batches before ``next_batch``."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until the broker has acknowledged everything; False when it did not in time.

        The time that digests and a delta take does not count.
        """


class NoBroker(BrokerPort):
    """The broker of ranks other than 0: it sends and expects nothing, and answers at once. What rank 0 receives reaches
    these ranks in collectives (``services/learner/share.py``). ``RankThread`` also serves the rank's part of versions."""

    reason_to_wait = "rank 0 waits for the broker"

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        return None

    def tell(self, message: ToBroker) -> None:
        """Do nothing: rank 0 tells the broker."""

    def take(self, timeout_s: float) -> Answer | None:
        return None

    def publish(self, publication: Publication) -> None:
        """Do nothing: nobody fetches."""

    def wait_for_room(self) -> None:
        """Return at once: nothing is kept."""

    def acknowledged(self, next_batch: int) -> bool:
        """Return True: only rank 0 knows of missing reports."""
        return True

    def flush(self, timeout_s: float) -> bool:
        return True
