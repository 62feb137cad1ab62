"""The learner's last request for a batch, and the broker's answer as it comes."""

from gspo_protocol.codec import Array
from gspo_protocol.messages import Batch, BatchPart, BatchPartRequest, BatchRequest, EndOfRun, SkipBatch
from gspo_services.learner.broker.parts import PartStream
from gspo_services.learner.broker.port import Answer, BatchAnnounced, PartArrived

FromBroker = Batch | BatchPart | SkipBatch | EndOfRun


class BatchExchange:
    """One request at a time, and everything that it brings: each answer is taken once, parts in order and whole. Pure.

    produces:     ``hear``: what the training loop gets, with never more than CREDIT parts that it has not taken
    waits for:    the broker; the next part; until the training loop takes those that came
    unblocked by: ``hear``; ``took``; ``ask_again`` after a reconnection or silence
    """

    def __init__(self) -> None:
        self.wanted: BatchRequest | None = None
        """The last request, while it is not answered."""
        self._parts: PartStream | None = None
        """Of the batch that was announced, while parts of it are to come."""
        self._waited_for: tuple[int, int] | None = None
        """The part awaited at the last look."""

    def want(self, request: BatchRequest) -> None:
        """Wait for the answer to ``request`` from now on."""
        self.wanted, self._parts = request, None

    def hear(self, message: FromBroker, arrays: dict[str, Array]) -> Answer | None:
        """Return what ``message`` adds to the answer; None: nothing, or not yet. A batch that was announced may be skipped
        until its last part has come.

        Raises: DamagedPart.
        """
        if isinstance(message, BatchPart):
            return self._next_part(message, arrays)
        if self.wanted is not None and message.index == self.wanted.index:
            self.wanted = None
            if isinstance(message, Batch):
                self._parts = PartStream(message)
                return BatchAnnounced(batch=message, arrays=arrays)
            return message
        if isinstance(message, SkipBatch) and self._parts is not None and message.index == self._parts.index:
            self._parts = None  # Some part of it cannot be read.
            return message
        return None

    def _next_part(self, part: BatchPart, arrays: dict[str, Array]) -> PartArrived | None:
        if self._parts is None or not self._parts.offer(part, arrays):
            return None
        if self._parts.complete:
            self._parts = None
        return PartArrived(part=part, arrays=arrays)

    def took(self) -> None:
        """Make room for another part: the training loop has taken one."""
        if self._parts is not None:
            self._parts.took()

    def ask_again(self) -> None:
        """Ask again for parts that have not come: they may be lost."""
        if self._parts is not None:
            self._parts.ask_again()

    def look(self) -> None:
        """Ask again for parts if none has come since the last look; otherwise each would be sent twice."""
        waits_for = None if self._parts is None else (self._parts.index, self._parts.next_part)
        if waits_for == self._waited_for:
            self.ask_again()
        self._waited_for = waits_for

    def request_for_parts(self) -> BatchPartRequest | None:
        """Return a request for as many parts as there is room for; None: there is nothing to ask for."""
        return None if self._parts is None else self._parts.request()
