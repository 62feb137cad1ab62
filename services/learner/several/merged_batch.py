"""What several brokers answer to one request for a batch, as the one stream that the training loop takes. Pure: no sockets,
no clock.
"""

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from gspo_protocol.messages import EndOfRun, SkipBatch, Trained
from gspo_services.learner.broker import CREDIT, Answer, BatchAnnounced, PartArrived
from gspo_services.learner.several.shares import first_parts, merged, merged_skip, renumbered


class MergedBatch:
    """One request, from its answers to the last part of the batch.

    produces:     ``ready``: the batch of all shares, then their parts in the brokers' order; or that it is to be skipped; or
                  the end of the run
    waits for:    an answer of every broker; then the next part of the share that comes next, and until the training thread
                  takes what was handed over: never more than CREDIT parts wait there
    unblocked by: ``hear``; ``took``
    """

    def __init__(self, index: int, num_brokers: int) -> None:
        self.index = index
        self._answers: list[BatchAnnounced | SkipBatch | EndOfRun | None] = [None] * num_brokers
        self._held: list[deque[PartArrived]] = [deque() for _ in range(num_brokers)]
        """Of each share: parts that came and were not handed over."""
        self._whole: BatchAnnounced | None = None
        """What was announced."""
        self._first_parts: dict[int, int] = {}
        self._order: deque[int] = deque()
        """The brokers whose parts are still to be handed over."""
        self._num_left = 0
        """Parts of the first of them that are."""
        self._handed: deque[int | None] = deque()
        """Of each part that the training thread has not taken: whose it is; None: of a batch that was announced before."""
        self._over = False
        self.end: EndOfRun | None = None
        """The first one that a broker sent."""

    def answer(self, broker: int) -> BatchAnnounced | SkipBatch | EndOfRun | None:
        """What this broker has answered; None: nothing yet."""
        return self._answers[broker]

    def waits_for(self, broker: int) -> bool:
        """Whether this broker has answered nothing, or its answer is void because another one has ended the run."""
        answer = self._answers[broker]
        return answer is None or (self.end is not None and not isinstance(answer, EndOfRun))

    def hear(self, broker: int, answer: Answer) -> bool:
        """Take an answer, or the next part of a share. A share that was announced may be quarantined later.

        Returns: whether all shares must come again from their first part, because one of a batch that was announced is
        missing now.
        """
        if isinstance(answer, PartArrived):
            self._held[broker].append(answer)
            return False
        if self._over:
            return False
        self._answers[broker] = answer
        if isinstance(answer, EndOfRun) and self.end is None:
            self.end = answer
        if self._whole is None:
            return False
        # Parts may have been handed over that do not belong to the batch any more.
        self._whole = None
        self._order.clear()
        for held in self._held:
            held.clear()
        self._handed = deque([None] * len(self._handed))
        return True

    def ready(self) -> list[Answer]:
        """What may be handed over now. Raises: ValueError when the shares do not make one batch."""
        if self._over:
            return []
        found: list[Answer] = []
        if self._whole is None:
            found += self._first()
        while self._order and len(self._handed) < CREDIT and self._held[self._order[0]]:
            broker = self._order[0]
            found.append(renumbered(self._held[broker].popleft(), self._first_parts[broker]))
            self._handed.append(broker)
            self._num_left -= 1
            if not self._num_left:
                self._order.popleft()
                self._begin_share()
        return found

    @property
    def next_broker(self) -> int | None:
        """The broker whose parts are waited for; None: no part is."""
        return self._order[0] if self._order else None

    def took(self) -> int | None:
        """The training thread has taken a part. Returns: whose it was; None: nobody waits for it."""
        return self._handed.popleft() if self._handed else None

    def reports(self, trained: Trained) -> Sequence[Trained]:
        """What each broker is told: its share was skipped or trained, and what all shares make together."""
        if self._whole is None:
            return [trained] * len(self._answers)
        told = replace(trained, metrics={**trained.metrics, **self._whole.batch.report})
        return [replace(told, skipped=isinstance(answer, SkipBatch)) for answer in self._answers]

    def _first(self) -> list[Answer]:
        """What the batch consists of, or what comes in its place, once it is known."""
        if any(self.waits_for(broker) for broker in range(len(self._answers))):
            return []
        if self.end is not None:
            self._over = True
            return [self.end]
        shares = {broker: each for broker, each in enumerate(self._answers) if isinstance(each, BatchAnnounced)}
        if not shares:
            self._over = True
            return [merged_skip({broker: each for broker, each in enumerate(self._answers) if isinstance(each, SkipBatch)})]
        self._whole = merged(shares)
        self._first_parts = first_parts(shares)
        self._order = deque(shares)
        self._begin_share()
        return [self._whole]

    def _begin_share(self) -> None:
        if not self._order:
            self._over = True
            return
        share = self._answers[self._order[0]]
        assert isinstance(share, BatchAnnounced)
        self._num_left = share.batch.num_parts
