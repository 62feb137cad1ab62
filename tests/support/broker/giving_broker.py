"""A broker that a learner's own processes are connected to: it has a batch for every request."""

import asyncio
from collections.abc import Callable
from typing import Final

from gspo_protocol.messages import BatchRequest, EndOfRun, Hello, Message
from tests.support.learner.scripted_broker import a_training_batch, send_batch
from tests.support.wire.zmq_ends import ScriptedEnd, a_welcome

PATIENCE_S: Final = 250.0


class GivingBroker:
    """Has a batch for every request up to ``last``, then, if it ``ends``, the end of the run. Keeps all reports."""

    def __init__(self, end: ScriptedEnd) -> None:
        self._end = end
        self._news = asyncio.Condition()
        self._given: set[int] = set()
        self.last = 2
        self.ends = False
        self.told: list[Message] = []

    async def serve(self) -> None:
        while True:
            incoming = await self._end.channel.receive()
            assert incoming.received is not None, incoming.error
            self._end.peer = incoming.peer
            message = incoming.received.message
            if isinstance(message, Hello):
                self._given.clear()
                await self._end.reply(a_welcome())
            elif incoming.received.seq is not None:
                await self._end.acknowledge(incoming.received)
            elif isinstance(message, BatchRequest) and message.index <= self.last and message.index not in self._given:
                self._given.add(message.index)
                await send_batch(self._end, a_training_batch(message.index, message.policy_version))
            elif isinstance(message, BatchRequest) and message.index > self.last and self.ends:
                await self._end.reply(EndOfRun(index=message.index, reason="enough"))
            async with self._news:
                self.told.append(message)
                self._news.notify_all()

    async def until(self, condition: Callable[[list[Message]], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: condition(self.told))
