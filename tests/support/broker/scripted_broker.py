"""The broker's end of the work channel, by script: grants the leases it was given, takes in order, acknowledges or not."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import zmq.asyncio
from msgspec import structs

from gspo_protocol.channels import WORK, ChannelSpec
from gspo_protocol.codec import Array, Received
from gspo_protocol.delivery import Inbox
from gspo_protocol.messages import (
    Ack,
    Chunk,
    Chunks,
    Finish,
    Grade,
    Heartbeat,
    Hello,
    Lease,
    LeaseKey,
    LeaseRequest,
    Message,
    NoLease,
    Pulse,
    Release,
)
from gspo_protocol.messages.gathered import Gathered
from tests.support.episodes import no_tokens
from tests.support.wire.zmq_ends import PATIENCE_S, ScriptedEnd, a_welcome

M = TypeVar("M", bound=Message)


class ScriptedBroker:
    """Serves one rollout. ``messages`` keeps what was taken, in order; ``until`` waits for something to be there."""

    def __init__(self, context: zmq.asyncio.Context, spec: ChannelSpec = WORK) -> None:
        self.end = ScriptedEnd(context, spec)
        self.endpoint = self.end.endpoint
        self.leases: list[tuple[Lease | Grade, Mapping[str, Array]]] = []
        self.acknowledges = True
        self.answers = True
        self.is_away = False
        """Whatever comes is lost."""
        self.grants_again = False
        """A lease for which the rollout had no room is given out once more, as a broker does. A rollout that waits long for
        an answer asks twice, and then gets more than it has room for."""
        self.retry_s = 60.0
        self.pulse = Pulse(policy_version=1, weights_endpoint="")
        self.messages: list[Message] = []
        self.chunks: dict[int, list[tuple[Chunk, dict[str, Array]]]] = {}
        self.num_hellos = 0
        self.num_repeated = 0
        self._inbox: Inbox | None = None
        self._granted: dict[int, tuple[Lease | Grade, Mapping[str, Array]]] = {}
        self._news = asyncio.Condition()

    def restart(self) -> None:
        """Forget all connections, as a new process does."""
        self._inbox = None

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            incoming = await self.end.channel.receive()
            assert incoming.received is not None, incoming.error
            if self.is_away:
                continue
            self.end.peer = incoming.peer
            message, seq = incoming.received.message, incoming.received.seq
            if isinstance(message, Hello):
                self.num_hellos += 1
                self._inbox = Inbox(message.first_seq)
                self.end.seen.append(incoming.received)
                await self._reply(_welcome(self.pulse))
            elif self._inbox is None:
                await self.end.refuse_session()
                continue
            elif seq is not None:
                if not self._inbox.offer(seq):
                    self.num_repeated += 1
                    continue
                for chunk, arrays in _chunks_in(incoming.received):
                    self.chunks.setdefault(chunk.trajectory_id, []).append((chunk, arrays))
                if self.acknowledges:
                    await self._reply(Ack(next_seq=self._inbox.committed()))
                if self.grants_again and isinstance(message, Release) and message.reason == "no room":
                    lease, tokens = self._granted[message.trajectory_id]
                    self.leases.append((structs.replace(lease, epoch=message.epoch + 1), tokens))
                    continue
            else:
                await self._answer(message)
            async with self._news:
                self.messages.append(message)
                self._news.notify_all()

    async def _answer(self, message: Message) -> None:
        if isinstance(message, Heartbeat) and self.answers:
            await self._reply(self.pulse)
        if isinstance(message, LeaseRequest):
            granted, self.leases = self.leases[: message.capacity], self.leases[message.capacity :]
            for lease, arrays in granted:
                self._granted[lease.trajectory_id] = (lease, arrays)
                await self._reply(lease, arrays)
            if len(granted) < message.capacity:
                await self._reply(NoLease(request_id=message.request_id, reason="no_prompts", retry_s=self.retry_s))

    async def _reply(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """Answer a rollout that may have left meanwhile."""
        await self.end.channel.send(self.end.peer, message, arrays)

    def grant(self, *leases: Lease) -> None:
        """Give these out when the rollout asks next."""
        self.leases += [(lease, no_tokens()) for lease in leases]

    async def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        await self.end.reply(message, arrays)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` holds; it is looked at after each message."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(condition)

    async def expect(self, kind: type[M], number: int = 1) -> M:
        """The ``number``-th message of a kind, waited for."""
        await self.until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    async def heartbeat_with(self, *leases: LeaseKey) -> Heartbeat:
        """Wait for a heartbeat that names exactly these leases."""
        wanted = set(leases)
        await self.until(lambda: any(set(beat.leases) == wanted for beat in self.of(Heartbeat)))
        return next(beat for beat in self.of(Heartbeat) if set(beat.leases) == wanted)

    def ended(self, trajectory_id: int) -> list[Message]:
        """How a trajectory's lease was given up by the rollout: Finish or Release."""
        return [
            message
            for message in self.messages
            if isinstance(message, Finish | Release) and message.trajectory_id == trajectory_id
        ]


def _chunks_in(received: Received) -> list[tuple[Chunk, dict[str, Array]]]:
    """One chunk, each of many, or none."""
    if isinstance(received.message, Chunks):
        chunks = Gathered(received.arrays)
        return [chunks.chunk(place) for place in range(len(chunks))]
    return [(received.message, received.arrays)] if isinstance(received.message, Chunk) else []


def _welcome(pulse: Pulse) -> Message:
    return a_welcome(policy_version=pulse.policy_version, weights_endpoint=pulse.weights_endpoint)
