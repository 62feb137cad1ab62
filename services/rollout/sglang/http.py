"""HTTP exchanges with the engine, and their errors."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from gspo_services.rollout.sglang.generation import is_about_the_request
from gspo_services.shared.runtime.http_content import UNCOMPRESSED, TooMuchContentError, content_within

T = TypeVar("T")
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""An event of 100,000 tokens with log-probs takes about 4 MB. No stream of ours has a larger one."""
MAX_ANSWER_BYTES: Final = 2 * MAX_EVENT_BYTES
"""Of an answer that is no stream."""
_CONNECT_TIMEOUT_S: Final = 5.0
_LEAST_SHARE: Final = 0.25
_KEEP_IDLE_S: Final = 2.0
"""The server closes a connection after 5 idle seconds; a request that is on its way at that moment fails."""


class EngineError(RuntimeError):
    """The engine did not do what it was asked."""


class EngineUnreachable(EngineError):
    """The engine's address does not answer, or not in time, or the connection broke."""


class EngineRefused(EngineError):
    """The engine refused this one request; it can serve others."""


class Silence:
    """How long the engine has answered none of the generation requests.

    Requests may be cancelled before they time out, because their leases end: a single one shows nothing.
    """

    def __init__(self, limit_s: float, now: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._now = now
        self._num_open = 0
        self._before_s = 0.0
        self._since_s = 0.0

    @contextmanager
    def asking(self) -> Iterator[float]:
        """Count a request as running inside. Yields the seconds that it may wait for its next bytes: less, the longer
        the engine has been silent, but at least a part of the limit.
        """
        if not self._num_open:
            self._since_s = self._now()
        self._num_open += 1
        try:
            yield max(_LEAST_SHARE * self._limit_s, self._limit_s - self._before_s - (self._now() - self._since_s))
        finally:
            self._num_open -= 1
            if not self._num_open:
                # Time without requests does not count.
                self._before_s += self._now() - self._since_s

    def broken(self) -> None:
        """Note an answer of the engine."""
        self._before_s, self._since_s = 0.0, self._now()


class EngineHttp:
    """Calls with JSON in and out. All raise EngineUnreachable, and EngineError for any answer but success."""

    def __init__(self, url: str, *, timeout_s: float, stall_timeout_s: float) -> None:
        """``timeout_s`` bounds a call, to its last byte; ``stall_timeout_s`` the wait for the next event of an answer that
        is generated."""
        self._url = url
        self._timeout_s = timeout_s
        self._silence = Silence(stall_timeout_s, time.monotonic)
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
        """Yield the JSON answers to one /generate call: one, or one for each event of the stream.

        Raises: EngineRefused when the status is about this request; EngineError when it is about the server.
        """
        with self._silence.asking() as wait_s:
            call = self._call("POST", "/generate", body, timeout_s=None, wait_s=wait_s, read_bufsize=MAX_EVENT_BYTES // 2)
            async with call as response:
                if response.status != HTTPStatus.OK:
                    failure = EngineRefused if is_about_the_request(response.status) else EngineError
                    async with asyncio.timeout(self._timeout_s):
                        raise failure(f"/generate: {response.status} {(await _content_of(response))[:500]!r}")
                if not stream:
                    async with asyncio.timeout(wait_s):
                        content = await _content_of(response)
                    self._silence.broken()
                    yield content
                    return
                async with aclosing(_within(wait_s, events(response.content))) as payloads:
                    async for payload in payloads:
                        self._silence.broken()
                        if payload != b"[DONE]":
                            yield payload

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        timeout_s: float | None,
        wait_s: float | None = None,
        read_bufsize: int | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Make one exchange. A caller that leaves before the end of the answer closes its connection.

        ``timeout_s`` bounds all of it, ``wait_s`` the wait for its headers. aiohttp accepts lines of up to twice
        ``read_bufsize``.
        """
        try:
            # Not its sock_read, which begins anew with each byte.
            async with asyncio.timeout(wait_s):
                response = await self._session.request(
                    method,
                    self._url + path,
                    data=data,
                    headers=UNCOMPRESSED if data is None else {"content-type": "application/json", **UNCOMPRESSED},
                    timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
                    allow_redirects=False,
                    read_bufsize=read_bufsize,
                )
            async with response:
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
            # No limit: an abort or a pause must never wait for a connection that generates. No proxy of the environment
            # (trust_env): it must not see traffic to the pod's own engine.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
            jar = aiohttp.DummyCookieJar()
            self._opened = aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=False, auto_decompress=False)
        return self._opened


async def events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the payloads of server-sent events; SGLang writes each as one ``data:`` line.

    Other lines are skipped, and so is a last line that the end of the stream cut off.
    Raises: EngineError for a line that the reader's buffer cannot hold.
    """
    try:
        async for line in content:
            if line.startswith(b"data:") and line.endswith(b"\n"):
                yield line[5:].strip()
    # ValueError: aiohttp before 3.14.
    except (LineTooLong, ValueError) as error:
        limit = content.get_read_buffer_limits()[1]
        raise EngineError(f"/generate: an event is larger than the limit of {limit} bytes") from error


def decode_answer(content: bytes, kind: type[T]) -> T:
    """Raises: EngineError when the content is not JSON of that kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    # ValueError: also text that is not UTF-8. RecursionError: deep nesting in fields that nobody reads.
    except (ValueError, RecursionError) as error:
        raise EngineError(f"not a {kind.__name__.strip('_')}: {error}: {content[:300]!r}") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = await _content_of(response)
    if response.status != HTTPStatus.OK:
        raise EngineError(f"{response.url.path}: {response.status} {content[:1000].decode(errors='replace')}")
    return content


async def _content_of(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await content_within(response, MAX_ANSWER_BYTES)
    except TooMuchContentError as error:
        raise EngineError(f"{response.url.path}: the answer {error}") from error


async def _within(wait_s: float, payloads: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the payloads. Raises: TimeoutError when the next one takes longer: bytes alone are no answer."""
    async with aclosing(payloads):
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    payload = await anext(payloads)
            except StopAsyncIteration:
                return
            yield payload
