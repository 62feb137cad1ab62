"""A ``BrokerPort`` to a connected broker: each call runs a coroutine of ``BrokerLoop`` and waits for its result."""

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from gspo_protocol.messages import LedgerCommit, Welcome
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.broker.batches import Answer, PartArrived
from gspo_services.learner.broker.loop import BrokerLoop
from gspo_services.learner.broker.port import BrokerPort, ToBroker
from gspo_services.learner.weights import WeightCopy
from gspo_services.shared.runtime.errors import ServiceError

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 600.0


class BrokerClient(BrokerPort):
    """The training thread's side of a ``BrokerLoop``. A subclass defines how calls and answers pass between the two."""

    _loop: BrokerLoop

    @abstractmethod
    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``coroutine`` in the loop. Raises: TimeoutError; what ended the loop."""

    @abstractmethod
    def _next_arrival(self, timeout_s: float) -> Answer | None:
        """Wait for an answer from the loop; None when nothing came in time. Raises: the error that ended the loop."""

    @property
    def reason_to_wait(self) -> str:
        return self._loop.reason_to_wait

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        try:
            return self._call(self._loop.welcome(), timeout_s)
        except TimeoutError:
            return None

    def welcomes(self) -> Sequence[Welcome]:
        return self._loop.welcomes

    def commits(self) -> Sequence[LedgerCommit | None]:
        return self._loop.commits

    def tell(self, message: ToBroker) -> None:
        with self._needs_acknowledgement():
            self._call(self._loop.tell(message), CALL_TIMEOUT_S)

    def take(self, timeout_s: float) -> Answer | None:
        arrived = self._next_arrival(timeout_s)
        if isinstance(arrived, PartArrived):
            with self._needs_acknowledgement():
                self._call(self._loop.part_taken(), CALL_TIMEOUT_S)
        return arrived

    def scores(self) -> Mapping[int, float | None]:
        return self._loop.scores

    def publish(
        self,
        policy_version: int,
        weights: WeightCopy,
        trained_batches: int,
        vocabulary: int,
        note_digest: Callable[[str], None],
        experts: ModelExperts | None = None,
    ) -> None:
        with self._needs_acknowledgement():
            publication = self._loop.publish(policy_version, weights, trained_batches, vocabulary, note_digest, experts)
            self._call(publication, CALL_TIMEOUT_S)

    def wait_for_room(self) -> None:
        with self._needs_acknowledgement():
            self._wait_for(self._loop.has_room, CALL_TIMEOUT_S)

    def acknowledged(self, next_batch: int) -> bool:
        return self._call(self._loop.acknowledged(next_batch), CALL_TIMEOUT_S)

    def flush(self, timeout_s: float) -> bool:
        try:
            self._wait_for(self._loop.flushed, timeout_s)
        except TimeoutError:
            return False
        return True

    def _wait_for(self, event: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Wait ``timeout_s`` for ``event``; start over while digests or a delta are computed: no broker can hurry those."""
        while True:
            try:
                return self._call(event(), timeout_s)
            except TimeoutError:
                if not self._loop.encoding:
                    raise

    @contextmanager
    def _needs_acknowledgement(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ServiceError(
                f"the broker at {self._loop.endpoint} has acknowledged nothing for {CALL_TIMEOUT_S:.0f} s: is it running?"
            ) from error
