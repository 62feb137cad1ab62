"""A rollout's connection to the broker: combines chunks that leave at about the same time into one message.

A chunk alone costs the broker five times as much as in a full message (docs/evidence/performance.md). Nothing waits while
nothing is unacknowledged: only chunks before the acknowledgement of the last message, or within GATHER_S, are gathered.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from gspo_protocol.codec import Array
from gspo_protocol.limits import (
    MAX_CHUNKS_PER_MESSAGE,
    MAX_GATHERED_TOKENS,
    MAX_RUNS,
    MAX_SEGMENTS,
    MAX_STATE_BYTES,
    MAX_TURNS,
)
from gspo_protocol.messages import SEQUENCED, Ack, Chunk, Finish, Graded, Journal, Message, Release
from gspo_protocol.messages.gathered import gather
from gspo_services.shared.net import PeerClient
from gspo_services.shared.runtime.lifecycle import until_stopped

GATHER_S: Final = 0.01
"""The longest time that a message waits for others."""
MAX_WAITING: Final = MAX_CHUNKS_PER_MESSAGE
"""Messages that may wait to be gathered; senders of more wait."""
_MOST: Final = (MAX_CHUNKS_PER_MESSAGE, MAX_GATHERED_TOKENS, MAX_SEGMENTS, MAX_RUNS, MAX_TURNS, MAX_STATE_BYTES)
Gatherable = Chunk | Journal | Finish | Graded | Release


@dataclass(frozen=True, eq=False, kw_only=True)
class Waiting:
    """An unsent message of an episode."""

    message: Gatherable
    arrays: Mapping[str, Array]
    since: float

    @property
    def size(self) -> tuple[int, ...]:
        """How much of a message's limits a chunk uses."""
        assert isinstance(self.message, Chunk)
        chunk = self.message
        state_bytes = 0 if chunk.state is None else len(msgpack.packb(chunk.state, use_bin_type=True))
        pieces = (len(chunk.segments), len(chunk.version_runs), len(chunk.turn_rewards))
        return (1, chunk.num_tokens, *pieces, state_bytes)


def gathered_next(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Return what to send next of the waiting messages: as many chunks as one message takes, or one message.

    Chunks may overtake what other episodes sent. Messages of one episode keep their order.
    """
    chosen: list[Waiting] = []
    filled = [0] * len(_MOST)
    overtaken: set[int] = set()
    for each in waiting:
        trajectory_id = each.message.trajectory_id
        if trajectory_id not in overtaken and isinstance(each.message, Chunk) and "experts" not in each.arrays:
            larger = [have + more for have, more in zip(filled, each.size, strict=True)]
            if not chosen or all(have <= most for have, most in zip(larger, _MOST, strict=True)):
                chosen.append(each)
                filled = larger
                continue
        overtaken.add(trajectory_id)
    return chosen or list(waiting[:1])


class GatheringClient(PeerClient):
    """The connection of a rollout's episodes.

    produces:     what a PeerClient does; chunks that wait leave together, as Chunks
    waits for:    acknowledgements, GATHER_S, or a full message; credit
    unblocked by: Ack
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting: list[Waiting] = []
        self._wake = asyncio.Event()
        self._num_hurried = 0
        self._under_way: deque[tuple[int, int]] = deque()
        """Sequence number of each message that left, and how many of episodes it has."""

    @property
    def num_unacknowledged(self) -> int:
        """Messages of episodes, waiting or unacknowledged; many may travel as one."""
        while self._under_way and self._under_way[0][0] < self._outbox.first_seq:
            self._under_way.popleft()
        return sum(number for _, number in self._under_way) + len(self._waiting)

    async def run(self) -> None:
        """See ``PeerClient.run``."""
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(self._send_waiting(), name="gather")
            try:
                await super().run()
            finally:
                sending.cancel()

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """See ``PeerClient.send``. An episode's message may wait here for others, and is kept like an unacknowledged one."""
        if not isinstance(message, SEQUENCED) or not (self._waiting or self._outbox.num_unacked):
            await self._leave(message, arrays, 1)
            return
        assert isinstance(message, Gatherable), message
        self._deliverable(message, arrays)  # The sender of an invalid message gets the error, not the task that gathers.
        async with self._room:
            await self._room.wait_for(lambda: len(self._waiting) < MAX_WAITING)
            self._waiting.append(Waiting(message=message, arrays=arrays or {}, since=self._clock.now()))
        self._wake.set()

    async def flushed(self) -> None:
        """See ``PeerClient.flushed``."""
        await self._hurry(lambda: not self._waiting and not self._outbox.num_unacked)

    async def acknowledged(self) -> None:
        """See ``PeerClient.acknowledged``."""
        here = set(self._waiting)
        await self._hurry(lambda: here.isdisjoint(self._waiting))
        await super().acknowledged()

    async def _hurry(self, condition: Any) -> None:
        """Let nothing wait for others until ``condition`` holds."""
        self._num_hurried += 1
        self._wake.set()
        try:
            async with self._room:
                await self._room.wait_for(condition)
        finally:
            self._num_hurried -= 1

    async def _on_ack(self, ack: Ack) -> None:
        await super()._on_ack(ack)
        self._wake.set()

    def _due_in(self) -> float:
        """Return the seconds until a message must leave."""
        is_full = len(self._waiting) >= MAX_WAITING
        if self._num_hurried or is_full or not self._outbox.num_unacked:
            return 0.0
        return self._waiting[0].since + GATHER_S - self._clock.now()

    async def _send_waiting(self) -> None:
        while True:
            if not self._waiting:
                await self._wake.wait()
            elif (seconds := self._due_in()) > 0:
                await until_stopped(self._wake, seconds)
            else:
                await self._send_next()
            self._wake.clear()

    async def _send_next(self) -> None:
        leaving = gathered_next(self._waiting)
        chunks = [(each.message, each.arrays) for each in leaving if isinstance(each.message, Chunk)]
        if len(chunks) > 1:
            await self._leave(*gather(chunks), len(chunks))
        else:
            await self._leave(leaving[0].message, leaving[0].arrays, 1)
        async with self._room:
            self._waiting = [each for each in self._waiting if each not in leaving]
            self._room.notify_all()

    async def _leave(self, message: Message, arrays: Mapping[str, Array] | None, number: int) -> None:
        seq = self._outbox.next_seq
        try:
            await super().send(message, arrays)
        finally:
            if self._outbox.next_seq > seq:
                self._under_way.append((seq, number))
