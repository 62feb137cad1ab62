"""The learner's connection to the only broker of its run."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gspo_protocol.messages import (
    BatchFailed,
    BatchRequest,
    EndOfRun,
    Heartbeat,
    LedgerCommit,
    Published,
    SkipBatch,
    Trained,
    Welcome,
)
from gspo_services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from gspo_services.learner.broker.connection import BrokerConnection
from gspo_services.learner.broker.connections import BrokerConnections, OpenConnection, Question
from gspo_services.learner.broker.parts import CREDIT
from gspo_services.shared.settings import Settings


class OneConnection(BrokerConnections):
    """See ``BrokerConnections``. Answers are handed over as they are, parts as the training thread takes them."""

    def __init__(self, settings: Settings, open_connection: OpenConnection, arrived: Callable[[Answer], None]) -> None:
        """Connect. Raises: as ``MakeConnections``."""
        assert settings.broker.num_brokers == 1, settings.broker.num_brokers
        self._arrived = arrived
        self._answer: OneAnswer | None = None
        """To the last request."""
        self._connection = open_connection(0, self._heard)
        self._connection.open()

    @property
    def commits(self) -> Sequence[LedgerCommit | None]:
        return [self._connection.commit]

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def reason_to_wait(self) -> str:
        if self._connection.refused:
            return self._connection.refused
        if not self._connection.connected:
            return f"no answer from the broker at {self._connection.endpoint}"
        return self._connection.pending or "the broker"

    @property
    def scores(self) -> Mapping[int, float | None]:
        return self._connection.scores

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._connection.run(), name="batch-client")
        tasks.create_task(self._connection.receive(), name="receive")

    def close(self) -> None:
        self._connection.close()

    async def welcome(self) -> Welcome:
        return await self._connection.welcome()

    async def tell(self, message: Question) -> None:
        if isinstance(message, BatchRequest):
            self._answer = OneAnswer()
            self._connection.want(message)
        elif not isinstance(message, BatchFailed):
            self._connection.resume_at(message.next_batch)
        await self._connection.send(message)

    def reports(self, trained: Trained) -> Sequence[Trained]:
        return [trained]

    async def report(self, reports: Sequence[Trained]) -> None:
        (trained,) = reports
        await self._connection.announce(trained)

    async def announce(self, published: Published) -> None:
        await self._connection.announce(published)

    def acknowledged(self, next_batch: int) -> bool:
        return self._connection.acknowledged_batches() >= next_batch

    async def flushed(self) -> None:
        await self._connection.flushed()

    async def part_taken(self) -> None:
        if self._answer is None:
            return
        is_wanted = self._answer.took()
        self._hand_over(self._answer)
        if is_wanted:
            await self._connection.part_taken()

    async def repeat(self, not_ready: Callable[[str], None]) -> None:
        # A person must see that the broker refuses this learner's key.
        if self._connection.refused:
            not_ready(self._connection.refused)
        await self._connection.ask_again()
        await self._connection.ask_for_silent_parts()

    async def beat(self, heartbeat: Heartbeat) -> None:
        await self._connection.send(heartbeat)

    async def _heard(self, connection: BrokerConnection, answer: Answer) -> None:
        # The connection is asked only for an answer.
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
