"""The learner's line to the only broker of its run."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gspo_protocol.messages import BatchFailed, BatchRequest, EndOfRun, Heartbeat, Published, SkipBatch, Trained, Welcome
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.line import BrokerLine
from gspo_services.learner.broker.lines import BatchLines, OpenLine, Question
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.shared.settings import Settings


class OneLine(BatchLines):
    """See ``BatchLines``. What the broker answers is handed over as it is, its parts as the training thread takes them."""

    def __init__(self, settings: Settings, open_line: OpenLine, arrived: Callable[[Answer], None]) -> None:
        """Connect. Raises: as ``MakeLines``."""
        assert settings.broker.num_brokers == 1, settings.broker.num_brokers
        self._arrived = arrived
        self._answer: OneAnswer | None = None
        """To the last request."""
        self._line = open_line(0, self._heard)
        self._line.open()

    @property
    def endpoint(self) -> str:
        return self._line.endpoint

    @property
    def reason_to_wait(self) -> str:
        if self._line.refused:
            return self._line.refused
        if not self._line.connected:
            return f"no answer from the broker at {self._line.endpoint}"
        return self._line.pending or "the broker"

    @property
    def scores(self) -> Mapping[int, float | None]:
        return self._line.scores

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._line.run(), name="batch-client")
        tasks.create_task(self._line.receive(), name="receive")

    def close(self) -> None:
        self._line.close()

    async def welcome(self) -> Welcome:
        return await self._line.welcome()

    async def tell(self, message: Question) -> None:
        if isinstance(message, BatchRequest):
            self._answer = OneAnswer()
            self._line.want(message)
        elif not isinstance(message, BatchFailed):
            self._line.resume_at(message.next_batch)
        await self._line.send(message)

    def reports(self, trained: Trained) -> Sequence[Trained]:
        return [trained]

    async def report(self, reports: Sequence[Trained]) -> None:
        (trained,) = reports
        await self._line.announce(trained)

    async def announce(self, published: Published) -> None:
        await self._line.announce(published)

    def acknowledged(self, next_batch: int) -> bool:
        return self._line.acknowledged_batches() >= next_batch

    async def flushed(self) -> None:
        await self._line.flushed()

    async def part_taken(self) -> None:
        if self._answer is None:
            return
        is_wanted = self._answer.took()
        self._hand_over(self._answer)
        if is_wanted:
            await self._line.part_taken()

    async def repeat(self, not_ready: Callable[[str], None]) -> None:
        # A person must see that the broker refuses this learner's key.
        if self._line.refused:
            not_ready(self._line.refused)
        await self._line.ask_again()
        await self._line.ask_for_silent_parts()

    async def beat(self, heartbeat: Heartbeat) -> None:
        await self._line.send(heartbeat)

    async def _heard(self, line: BrokerLine, answer: Answer) -> None:
        # The line is asked only for an answer.
        assert self._answer is not None
        self._answer.hear(answer)
        self._hand_over(self._answer)

    def _hand_over(self, answer: "OneAnswer") -> None:
        for each in answer.ready():
            self._arrived(each)


class OneAnswer:
    """What the broker answers to one request, from its first word to the last part of the batch. Pure.

    produces:     ``ready``: what the broker has said, in order
    waits for:    the next part; and until the training thread takes what was handed over: never more than CREDIT parts wait
    unblocked by: ``hear``; ``took``
    """

    def __init__(self) -> None:
        self._waiting: deque[Answer] = deque()
        self._handed: deque[bool] = deque()
        """Of each part that the training thread has not taken: whether its batch is still wanted."""
        self._num_left = 0
        """Parts of the batch that have not come."""
        self._is_over = False

    def hear(self, answer: Answer) -> None:
        """Take what the broker says. A batch that was announced may be skipped until its last part was handed over."""
        if isinstance(answer, PartArrived):
            self._waiting.append(answer)
        elif not self._is_over:
            self._waiting = deque([answer])
            self._handed = deque([False] * len(self._handed))

    def ready(self) -> list[Answer]:
        """What may be handed over now."""
        found: list[Answer] = []
        while self._waiting and not self._is_over:
            first = self._waiting[0]
            if isinstance(first, PartArrived):
                if len(self._handed) >= CREDIT:
                    break
                self._handed.append(True)
                self._num_left -= 1
                self._is_over = not self._num_left
            elif isinstance(first, BatchAnnounced):
                self._num_left = first.batch.num_parts
            else:
                assert isinstance(first, SkipBatch | EndOfRun), first
                self._is_over = True
            found.append(self._waiting.popleft())
        return found

    def took(self) -> bool:
        """The training thread has taken a part. Returns whether one more is to be asked for."""
        return self._handed.popleft() if self._handed else False
