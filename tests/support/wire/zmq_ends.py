"""The binding end of a channel, played by a test over real ZeroMQ on loopback."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import zmq
import zmq.asyncio

from gspo_protocol.channels import ChannelSpec
from gspo_protocol.codec import Array, Received
from gspo_protocol.limits import PROTOCOL_VERSION
from gspo_protocol.messages import SEQUENCED, Ack, Hello, LedgerCommit, Message, Refused, Role, Welcome
from gspo_services.shared.net.channel import RouterChannel
from gspo_services.shared.net.peer import UNKNOWN_SESSION, PeerClient
from gspo_services.shared.net.security import PLAINTEXT, Security
from gspo_services.shared.runtime.clock import Clock, MonotonicClock

M = TypeVar("M", bound=Message)
ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 60.0
"""No test waits for this long unless it is about to fail."""


@contextlib.asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


class ScriptedEnd:
    """Receives and answers on the test's command. ``seen`` keeps everything that came in, in order."""

    def __init__(self, context: zmq.asyncio.Context, spec: ChannelSpec, endpoint: str = ANY_PORT) -> None:
        self.channel = RouterChannel(context, spec, endpoint)
        self.endpoint = self.channel.endpoint
        self.peer = b""
        self.seen: list[Received] = []

    async def receive(self) -> Received:
        async with asyncio.timeout(PATIENCE_S):
            incoming = await self.channel.receive()
        assert incoming.received is not None, incoming.error
        self.peer = incoming.peer
        self.seen.append(incoming.received)
        return incoming.received

    async def expect(self, kind: type[M]) -> M:
        """The next message of this kind. Others are skipped, and kept in ``seen``."""
        return (await self.expect_received(kind)).message  # type: ignore[return-value]

    async def expect_received(self, kind: type[Message]) -> Received:
        while True:
            received = await self.receive()
            if isinstance(received.message, kind):
                return received

    async def reply(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        assert await self.channel.send(self.peer, message, arrays), "the peer is gone"

    async def welcome(self, **changes: object) -> Hello:
        """Wait for Hello and answer it."""
        hello = await self.expect(Hello)
        await self.reply(a_welcome(**changes))
        return hello

    async def refuse_session(self) -> None:
        """The answer of a restarted broker."""
        await self.reply(Refused(reason=f"{UNKNOWN_SESSION}: say hello"))

    async def acknowledge(self, received: Received) -> None:
        assert received.seq is not None
        await self.reply(Ack(next_seq=received.seq + 1))

    def close(self) -> None:
        self.channel.close()


def a_welcome(**changes: object) -> Welcome:
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "run_id": "test",
        "policy_version": 0,
        **changes,
    }
    return Welcome(**fields)  # type: ignore[arg-type]


def a_client(
    context: zmq.asyncio.Context,
    spec: ChannelSpec,
    endpoint: str,
    *,
    role: Role = "rollout",
    name: str = "rollout-0",
    session: str = "",
    clock: Clock | None = None,
    fingerprint: str = "",
    security: Security = PLAINTEXT,
    known: LedgerCommit | None = None,
) -> PeerClient:
    return PeerClient(
        context,
        spec,
        endpoint,
        role=role,
        peer=name,
        session=session or f"session of {name}",
        clock=MonotonicClock() if clock is None else clock,
        fingerprint=fingerprint,
        security=security,
        known=lambda: known,
    )


@contextlib.asynccontextmanager
async def in_background(*coroutines: object) -> AsyncIterator[None]:
    """Run coroutines beside the block, and cancel them at its end. Raises: what they raise, in a group."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]  # type: ignore[arg-type]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


@contextlib.asynccontextmanager
async def connected(
    spec: ChannelSpec, *, clock: Clock | None = None, role: Role = "rollout"
) -> AsyncIterator[tuple[ScriptedEnd, PeerClient]]:
    """A scripted end and a client that it has welcomed."""
    async with zmq_context() as context:
        end = ScriptedEnd(context, spec)
        client = a_client(context, spec, end.endpoint, clock=clock, role=role)
        async with in_background(client.run()):
            await end.welcome()
            await client.connected_welcome()
            yield end, client


def sequenced(end: ScriptedEnd) -> list[tuple[int | None, Message]]:
    """The sequenced messages that came in, with their numbers."""
    return [(received.seq, received.message) for received in end.seen if isinstance(received.message, SEQUENCED)]
