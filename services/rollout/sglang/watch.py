"""Watches a rollout's SGLang server: it may die, or keep running without listening."""

import asyncio
from typing import Final, NoReturn
from urllib.parse import urlsplit

from gspo_services.rollout.sglang.server_process import EngineServer
from gspo_services.shared.runtime.errors import ServiceError

KNOCK_S: Final = 2.0
REFUSALS: Final = 3
"""After this many refused connections in a row the server has stopped listening."""


async def fail_when_dead(server: EngineServer) -> NoReturn:
    """Raises: ServiceError when the server's process has ended."""
    raise ServiceError(await server.wait_dead())


async def fail_when_deaf(url: str, *, knock_s: float = KNOCK_S) -> NoReturn:
    """Raises: ServiceError when nothing listens at ``url`` any more.

    An SGLang that is told to end stops listening, kills its scheduler, and then waits for open streams, which nothing will
    ever fill. Its process lives on, and a stream stays silent until its timeout.

    waits for:    a connection, every ``knock_s``
    unblocked by: its outcome; if a server only hangs, the kernel still accepts its connections
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
        # The calls themselves report any other trouble (a name that is not resolved for a moment, no answer).
        except (OSError, TimeoutError):
            refused = 0
        else:
            refused = 0
            writer.close()
    raise ServiceError(
        f"nothing listens at {url} any more ({REFUSALS} connections in a row were refused): SGLang was stopped"
    )
