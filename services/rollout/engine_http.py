"""HTTP exchanges with the engine, and the errors that they can end with."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import httpx
import msgspec

from services.rollout.connections import Connections
from services.rollout.generation import is_about_the_request
from services.rollout.sse import EventParser

T = TypeVar("T")
_CONNECT_TIMEOUT_S: Final = 5.0


class EngineError(RuntimeError):
    """The engine did not do what it was asked to."""


class EngineUnreachable(EngineError):
    """Nothing answers at the engine's address, or not in time, or the connection broke."""


class EngineRefused(EngineError):
    """The engine refused this one request; it can serve others."""


class EngineHttp:
    """Calls that take and give JSON. All raise EngineUnreachable, and EngineError for an answer that is not success."""

    def __init__(self, url: str, *, timeout_s: float, stall_timeout_s: float) -> None:
        self._url = url
        self._streams = Connections(url, httpx.Timeout(stall_timeout_s, connect=_CONNECT_TIMEOUT_S))
        # Apart, so that an abort or a pause never waits for a connection that generates.
        self._control = Connections(url, httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S))

    async def aclose(self) -> None:
        """Close all idle connections."""
        await self._streams.aclose()
        await self._control.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        """GET and decode the answer."""
        async with self._translate_errors(path), self._control.one() as client:
            return decode_answer(_content(await client.get(path)), kind)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> bytes:
        """POST; returns the content of a successful answer."""
        async with self._translate_errors(path), self._control.one() as client:
            timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
            return _content(await client.post(path, json=body, timeout=timeout))

    async def status(self, path: str, *, timeout_s: float) -> int:
        """GET; returns the status code, whatever it is."""
        async with self._translate_errors(path), self._control.one() as client:
            return (await client.get(path, timeout=timeout_s)).status_code

    async def answers(self, body: bytes, *, stream: bool) -> AsyncGenerator[bytes, None]:
        """The JSON answers to one /generate call: one, or one for each event of the stream.

        Raises EngineRefused, too: for a status that is about this request, and not for one that is about the server.
        """
        async with self._translate_errors("/generate"), self._streams.one() as client:
            headers = {"content-type": "application/json"}
            async with client.stream("POST", "/generate", content=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    failure = EngineRefused if is_about_the_request(response.status_code) else EngineError
                    raise failure(f"/generate: {response.status_code} {(await response.aread())[:500]!r}")
                if not stream:
                    yield await response.aread()
                    return
                parser = EventParser()
                async for data in response.aiter_raw():
                    try:
                        payloads = parser.feed(data)
                    except ValueError as error:
                        raise EngineError(f"/generate: {error}") from error
                    for payload in payloads:
                        if payload != b"[DONE]":
                            yield payload

    @asynccontextmanager
    async def _translate_errors(self, path: str) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise EngineUnreachable(f"{self._url}{path}: no answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise EngineUnreachable(f"{self._url}{path}: {type(error).__name__} {error}") from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}{path}: {error}") from error


def decode_answer(content: bytes, kind: type[T]) -> T:
    """Raises: EngineError when the content is not JSON of that kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    # ValueError: also text that is no UTF-8; RecursionError: lists in lists in fields that nobody reads.
    except (ValueError, RecursionError) as error:
        raise EngineError(f"not a {kind.__name__.strip('_')}: {error}: {content[:300]!r}") from error


def _content(response: httpx.Response) -> bytes:
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"{response.request.url.path}: {response.status_code} {response.text[:1000]}")
    return response.content
