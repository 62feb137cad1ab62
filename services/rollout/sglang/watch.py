"""Watches the SGLang server that a rollout uses: what ends it, and what leaves it running and deaf."""

import asyncio
from typing import Final, NoReturn
from urllib.parse import urlsplit

from services.rollout.sglang.server import EngineServer
from services.runtime.errors import ServiceError

KNOCK_S: Final = 2.0
REFUSALS: Final = 3
"""So many refused connections in a row, and nobody listens there any more."""


async def fail_when_dead(server: EngineServer) -> NoReturn:
    """Raises: ServiceError when the server's process has ended."""
    raise ServiceError(await server.wait_dead())


async def fail_when_deaf(url: str, *, knock_s: float = KNOCK_S) -> NoReturn:
    """Raises: ServiceError when nothing listens at ``url`` any more.

    An SGLang that was told to end closes its door, kills its scheduler, and then waits for open streams, which nobody will
    ever fill: its process lives on, and a stream says nothing until its timeout.

    waits for:    a connection, every ``knock_s``
    unblocked by: its outcome; a server that hangs still has its connections accepted by the kernel
    """
    address = urlsplit(url)
    assert address.hostname is not None
    port = address.port or (443 if address.scheme == "https" else 80)
    refused = 0
    while refused < REFUSALS:
        await asyncio.sleep(knock_s)
        try:
            async with asyncio.timeout(knock_s):
                _, writer = await asyncio.open_connection(address.hostname, port)
        except ConnectionRefusedError:
            refused += 1
        # Any other trouble (a name that is not resolved for a moment, no answer) is told by the calls themselves.
        except (OSError, TimeoutError):
            refused = 0
        else:
            refused = 0
            writer.close()
    raise ServiceError(
        f"nothing listens at {url} any more ({REFUSALS} connections in a row were refused): SGLang was stopped"
    )
