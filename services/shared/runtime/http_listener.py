"""aiohttp's server: a bounded number of connections, and a log that strangers cannot fill."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gspo_services.shared.runtime.errors import EndpointError

log = structlog.get_logger()

_IDLE_S: Final = 75.0
_CLEANUP_S: Final = 0.1
"""Whoever stops the server told what is under way to end before."""


async def listen(
    handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    host: str,
    port: int,
    max_connections: int,
    idle_s: float = _IDLE_S,
) -> web.ServerRunner:
    """Serve with ``handler``, which is cancelled when its client hangs up. ``cleanup`` of what is returned ends it.

    ``idle_s``: seconds until a connection is closed that has no whole request.

    Raises: EndpointError when the port is taken or the address is not of this host.
    """
    server = _Server(
        handler,
        max_connections=max_connections,
        handler_cancellation=True,
        keepalive_timeout=idle_s,
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
    )
    runner = web.ServerRunner(server, shutdown_timeout=_CLEANUP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise EndpointError(f"endpoint {host}:{port}: {error.strerror or error}. Choose another port") from error
    return runner


class _Server(web.Server):
    """Closes connections beyond a limit at once; those that wait for nothing are closed after a while, and make room."""

    def __init__(self, *arguments: object, max_connections: int, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._max_connections = max_connections

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._max_connections:
            log.warning("http_connection_refused", connections=self._max_connections)
            transport.abort()


def _http_log() -> logging.Logger:
    """Return aiohttp's log of the server, without tracebacks for clients that do not speak HTTP."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_not_about_the_client)
    return logger


def _is_not_about_the_client(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
