"""HTTP connections to the engine, one httpx client each."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpx

_KEEP_IDLE_S: Final = 2.0


class Connections:
    """Clients of one connection each, handed out to one request at a time and kept alive between requests.

    One client with a pool looks at every connection and every waiting request whenever any of them changes: 64
    concurrent requests cost 13 ms of CPU each, and held the engine to 46 requests/s where this gives 136.
    """

    def __init__(self, base_url: str, timeout: httpx.Timeout) -> None:
        self._base_url = base_url
        self._timeout = timeout
        # Creating a context reads the certificate store, 20 ms each time.
        self._tls = ssl.create_default_context()
        self._idle: list[httpx.AsyncClient] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for the duration of one exchange; after an error or a cancellation its connection is closed, not kept."""
        client = self._idle.pop() if self._idle else self._create()
        try:
            yield client
        except BaseException:
            await client.aclose()
            raise
        self._idle.append(client)

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed by whoever uses them."""
        while self._idle:
            await self._idle.pop().aclose()

    def _create(self) -> httpx.AsyncClient:
        # The server closes a connection that was idle for 5 s; one that is closed while a request is on its way fails it.
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_KEEP_IDLE_S)
        # trust_env=False: a proxy from the environment must not see traffic to the pod's own engine.
        return httpx.AsyncClient(
            base_url=self._base_url, timeout=self._timeout, limits=limits, trust_env=False, verify=self._tls
        )
