"""A broker with keys, and connections that have some."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from gspo_protocol.channels import WORK, ChannelSpec
from gspo_protocol.messages import Ack, Message
from gspo_services.shared.net.channel import DealerChannel
from gspo_services.shared.net.security import Security
from tests.support.broker.process import BrokerProcess, broker_process

SOON_S = 60.0


@contextlib.asynccontextmanager
async def secured_broker(tmp_path: Path, keys: Path) -> AsyncIterator[BrokerProcess]:
    async with broker_process(tmp_path, security={"keys": str(keys)}) as broker:
        yield broker


@contextlib.asynccontextmanager
async def connection(
    context: zmq.asyncio.Context, spec: ChannelSpec, broker: BrokerProcess, security: Security, identity: str
) -> AsyncIterator[DealerChannel]:
    """A bare admitted connection, which does not follow the rules of a PeerClient."""
    endpoint = broker.work_endpoint if spec is WORK else broker.batch_endpoint
    channel = DealerChannel(context, spec, endpoint, identity, security)
    try:
        yield channel
    finally:
        channel.close(linger_ms=0)


async def ask(channel: DealerChannel, message: Message) -> Message:
    assert await channel.send(message)
    return await answer(channel)


def without_commit(ack: Message) -> Message:
    """An Ack without the ledger's newest commit, which no test can foretell."""
    assert isinstance(ack, Ack), ack
    assert ack.commit is not None
    return msgspec.structs.replace(ack, commit=None)


async def answer(channel: DealerChannel) -> Message:
    async with asyncio.timeout(SOON_S):
        incoming = await channel.receive()
    assert incoming.received is not None, incoming.error
    return incoming.received.message
