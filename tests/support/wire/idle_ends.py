"""A process with the binding ends of channels that nobody reads: ``python -m tests.support.wire.idle_ends``.

It prints the port of its work channel and ends with status 0 when its standard input is closed.
"""

import asyncio
import sys

import zmq.asyncio

from gspo_protocol.channels import WORK
from gspo_services.shared.net import RouterChannel


async def _idle() -> None:
    context = zmq.asyncio.Context()
    channel = RouterChannel(context, WORK, "tcp://127.0.0.1:*")
    print(channel.endpoint.rpartition(":")[2], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    channel.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(_idle())
