"""One HTTP exchange with an agent: a JSON answer or an event stream, and errors in whatever form is still possible."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.dialects import error_of, path_of

RETRY_AFTER_S: Final = 1
OVERRIDDEN_HEADER: Final = "x-gspo-overridden"
_REQUEST_ID_HEADER: Final = "x-request-id"
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_TO_RETRY: Final = (408, 429, 503)


class AgentGone(Exception):
    """The agent no longer takes the answer: it hung up, or does not read."""


class Exchange:
    """A request and its response, bounded in memory: each write waits until the agent has read the previous one."""

    def __init__(self, request: web.BaseRequest, *, silent_s: float) -> None:
        """``silent_s`` bounds the wait for the agent's whole body, and for the agent to take our next bytes."""
        self.request = request
        given = request.headers.get(_REQUEST_ID_HEADER, "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        self.headers = {_REQUEST_ID_HEADER: self.request_id}
        """Headers of the response, until it has begun."""
        self.path = path_of(request.path)
        self.failed: Callable[[CallRefused], bytes] | None = None
        """Makes the last event of a stream that fails; there before a stream begins."""
        self._silent_s = silent_s
        self._response: web.StreamResponse | None = None

    @property
    def key(self) -> str:
        """The key of the episode. Raises: CallRefused, status 401, without one."""
        scheme, _, key = self.request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        key = key or self.request.headers.get("x-api-key", "").strip()
        if not key:
            text = "no key: send the episode's key as `Authorization: Bearer <key>`, or as `x-api-key` (a client's api_key)"
            raise CallRefused(401, "invalid_api_key", text)
        return key

    async def body(self, most_bytes: int) -> bytearray:
        """Read the request's body. Raises: CallRefused, status 400, 408, 413 or 415; AgentGone."""
        if self.request.headers.get("content-encoding", "identity").lower() != "identity":
            raise CallRefused(415, "unsupported_encoding", "the body is compressed: send it uncompressed")
        too_large = CallRefused(413, "too_large", f"the body has more than {most_bytes} bytes, the limit for a call")
        if (self.request.content_length or 0) > most_bytes:
            raise too_large
        if self.request.headers.get("expect", "").lower() == "100-continue":
            async with self._taking():
                await self.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.request.writer.output_size = 0
        body = bytearray()
        try:
            async with asyncio.timeout(self._silent_s):
                while not self.request.content.at_eof():
                    body += await self.request.content.readany()
                    if len(body) > most_bytes:
                        raise too_large
        except TimeoutError as error:
            raise CallRefused(408, "slow_body", f"the body was not whole in {self._silent_s:g} s") from error
        except web.RequestPayloadError as error:
            raise CallRefused(400, "broken_body", "the body's framing is broken") from error
        except ConnectionError as error:
            raise AgentGone from error
        return body

    async def answer(self, status: int, body: bytes) -> int:
        """Send the whole response. Returns the status. Raises: AgentGone."""
        if status in _TO_RETRY:
            self.headers["retry-after"] = str(RETRY_AFTER_S)
        response = web.Response(status=status, body=body, headers=self.headers, content_type="application/json")
        if status == 503:
            response.force_close()
        self._response = response
        async with self._taking():
            await response.prepare(self.request)
            await response.write_eof()
        return status

    async def send(self, event: bytes) -> None:
        """Send an event of a stream; the first one begins it. Raises: AgentGone."""
        async with self._taking():
            if self._response is None:
                headers = {**self.headers, "cache-control": "no-cache", "content-type": "text/event-stream; charset=utf-8"}
                self._response = web.StreamResponse(headers=headers)
                await self._response.prepare(self.request)
            await self._response.write(event)

    async def end_stream(self) -> None:
        """Raises: AgentGone."""
        assert self._response is not None
        async with self._taking():
            await self._response.write_eof()

    async def refuse(self, refused: CallRefused) -> None:
        """Tell the agent why there is no answer, or no more of it. Raises: AgentGone."""
        if self._response is None:
            await self.answer(refused.status, error_of(self.path)(refused, self.request_id))
        elif not self._response.prepared or isinstance(self._response, web.Response):
            # An answer that has begun cannot be revoked.
            raise AgentGone
        else:
            assert self.failed is not None
            await self.send(self.failed(refused))
            await self.end_stream()

    @property
    def response(self) -> web.StreamResponse:
        """The response as sent; a placeholder for a closed connection."""
        return web.Response(status=499) if self._response is None else self._response

    def hang_up(self) -> None:
        """Drop the connection and its unsent data, so that an agent that does not read holds no memory."""
        if self.request.transport is not None:
            self.request.transport.abort()

    @asynccontextmanager
    async def _taking(self) -> AsyncIterator[None]:
        """Raises: AgentGone when the agent does not take in time what is written inside."""
        try:
            async with asyncio.timeout(self._silent_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise AgentGone from error
        except ConnectionError as error:
            raise AgentGone from error
