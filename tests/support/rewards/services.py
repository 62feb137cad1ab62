"""HTTP services for tests, on a free port of this host."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handle: Handler, path: str = "/solve") -> AsyncIterator[str]:
    """A service that answers POSTs to ``path``; gives its URL."""
    application = web.Application(client_max_size=16 * 1024 * 1024)
    application.router.add_post(path, handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()
