"""HTTP exchanges with the engine, and the errors that they can end with."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from services.rollout.sglang.generation import is_about_the_request
from services.rollout.sglang.sse import EventParser

T = TypeVar("T")
_CONNECT_TIMEOUT_S: Final = 5.0
_KEEP_IDLE_S: Final = 2.0
"""The server closes a connection that was idle for 5 s; one that is closed while a request is on its way fails it."""


class EngineError(RuntimeError):
    """The engine did not do what it was asked to."""


class EngineUnreachable(EngineError):
    """Nothing answers at the engine's address, or not in time, or the connection broke."""


class EngineRefused(EngineError):
    """The engine refused this one request; it can serve others."""


class EngineHttp:
    """Calls that take and give JSON. All raise EngineUnreachable, and EngineError for an answer that is not success."""

    def __init__(self, url: str, *, timeout_s: float, stall_timeout_s: float) -> None:
        """Seconds in which a call has to answer, and an answer that is generated to go on."""
        self._url = url
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._opened: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()

    async def get(self, path: str, kind: type[T]) -> T:
        """GET and decode the answer."""
        async with self._call("GET", path, timeout_s=self._timeout_s) as response:
            return decode_answer(await _content(response), kind)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> bytes:
        """POST; returns the content of a successful answer."""
        data = msgspec.json.encode(body)
        async with self._call("POST", path, data, timeout_s=self._timeout_s if timeout_s is None else timeout_s) as response:
            return await _content(response)

    async def status(self, path: str, *, timeout_s: float) -> int:
        """GET; returns the status code, whatever it is."""
        async with self._call("GET", path, timeout_s=timeout_s) as response:
            return response.status

    async def answers(self, body: bytes, *, stream: bool) -> AsyncGenerator[bytes, None]:
        """The JSON answers to one /generate call: one, or one for each event of the stream.

        Raises EngineRefused, too: for a status that is about this request, and not for one that is about the server.
        """
        async with self._call("POST", "/generate", body, timeout_s=self._stall_timeout_s) as response:
            if response.status != HTTPStatus.OK:
                failure = EngineRefused if is_about_the_request(response.status) else EngineError
                raise failure(f"/generate: {response.status} {(await response.read())[:500]!r}")
            if not stream:
                yield await response.read()
                return
            parser = EventParser()
            async for data in response.content.iter_any():
                try:
                    payloads = parser.feed(data)
                except ValueError as error:
                    raise EngineError(f"/generate: {error}") from error
                for payload in payloads:
                    if payload != b"[DONE]":
                        yield payload

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, data: bytes | None = None, *, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange. Left before the end of the answer, its connection is closed, and not kept for others."""
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=data,
                headers=None if data is None else {"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s),
                allow_redirects=False,
            ) as response:
                yield response
        except TimeoutError as error:
            raise EngineUnreachable(f"{self._url}{path}: no answer in time ({type(error).__name__})") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
            raise EngineUnreachable(f"{self._url}{path}: {type(error).__name__} {error}") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{self._url}{path}: {type(error).__name__} {error}") from error

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Opened by the first call, because it belongs to an event loop."""
        if self._opened is None:
            # No limit: an abort or a pause must never wait for a connection that generates. Proxies of the environment are
            # not asked: they must not see traffic to the pod's own engine.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
            self._opened = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        return self._opened


def decode_answer(content: bytes, kind: type[T]) -> T:
    """Raises: EngineError when the content is not JSON of that kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    # ValueError: also text that is no UTF-8; RecursionError: lists in lists in fields that nobody reads.
    except (ValueError, RecursionError) as error:
        raise EngineError(f"not a {kind.__name__.strip('_')}: {error}: {content[:300]!r}") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = await response.read()
    if response.status != HTTPStatus.OK:
        raise EngineError(f"{response.url.path}: {response.status} {content[:1000].decode(errors='replace')}")
    return content
