"""aiohttp's server: connections that say nothing keep nobody out, and strangers cannot fill the log."""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gspo_services.shared.runtime.connection_places import ConnectionPlaces
from gspo_services.shared.runtime.errors import EndpointError

log = structlog.get_logger()

_IDLE_S: Final = 75.0
_HEAD_S: Final = 10.0
"""From a connection to the end of its first request's headers."""
_CLEANUP_S: Final = 0.1
"""Whoever stops the server told what is under way to end before."""
_BACKLOG: Final = 1024
Handler = Callable[[Any], Awaitable[web.StreamResponse]]


async def listen(
    handler: Handler,
    host: str,
    port: int,
    max_connections: int,
    *,
    application: web.Application | None = None,
    head_s: float = _HEAD_S,
    idle_s: float = _IDLE_S,
) -> web.ServerRunner:
    """Serve with ``handler``, which is cancelled when its client hangs up. ``cleanup`` of what is returned ends it.

    ``max_connections``: see ``ConnectionPlaces``; fewer where the process may open fewer files. ``head_s``: from a
    connection to its first request. ``idle_s``: from an answer to the next request. ``application`` makes the requests, if
    they are for one.
    Raises: EndpointError when the port is taken or the address is not of this host.
    """
    options = {} if application is None else {"request_factory": application._make_request}
    server = _Server(
        handler,
        most=min(max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        head_s=head_s,
        handler_cancellation=True,
        keepalive_timeout=idle_s,
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
        **options,
    )
    runner = web.ServerRunner(server, shutdown_timeout=_CLEANUP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        raise EndpointError(f"endpoint {host}:{port}: {error.strerror or error}. Choose another port") from error
    return runner


class _Server(web.Server):
    """Closes connections that wait for nothing after a while, and at once when they have to make room."""

    def __init__(self, handler: Handler, *, most: int, head_s: float, **options: Any) -> None:
        super().__init__(self._worked_for, **options)
        self._handler = handler
        self._head_s = head_s
        self._places: ConnectionPlaces[web.RequestHandler] = ConnectionPlaces(most)
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        address = transport.get_extra_info("peername")
        closed = self._places.come(handler, str(address[0]) if address else "")
        self._silent[handler] = asyncio.get_running_loop().call_later(self._head_s, transport.abort)
        if closed is not None:
            log.warning("http_connection_closed", reason="too many wait for nothing")
            if closed.transport is not None:
                closed.transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._places.gone(handler)
        self._speaks(handler)

    def _speaks(self, handler: web.RequestHandler) -> None:
        timer = self._silent.pop(handler, None)
        if timer is not None:
            timer.cancel()

    async def _worked_for(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._speaks(connection)
        self._places.work(connection)
        try:
            return await self._handler(request)
        finally:
            self._places.wait(connection)


def _http_log() -> logging.Logger:
    """Return aiohttp's log of the server, without tracebacks for clients that do not speak HTTP."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_not_about_the_client)
    return logger


def _is_not_about_the_client(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
