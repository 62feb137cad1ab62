"""Peers that answer over HTTP and must not be believed: each sends something else, for as long as it is listened to."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
MIB: Final = 2**20
Lie = Callable[[], AsyncIterator[bytes]]


def _once(data: bytes) -> Lie:
    async def say() -> AsyncIterator[bytes]:
        yield data

    return say


def _body(data: bytes, *, headers: bytes = b"") -> Lie:
    return _once(OK + headers + b"Content-Length: %d\r\n\r\n" % len(data) + data)


def _endless(head: bytes, piece: bytes) -> Lie:
    async def say() -> AsyncIterator[bytes]:
        yield head
        while True:
            yield piece

    return say


def _dripping(head: bytes, piece: bytes) -> Lie:
    """A piece well within any timeout of a read."""

    async def say() -> AsyncIterator[bytes]:
        yield head
        while True:
            await asyncio.sleep(0.1)
            yield piece

    return say


def _silent(head: bytes = b"") -> Lie:
    async def say() -> AsyncIterator[bytes]:
        yield head
        await asyncio.Event().wait()

    return say


LIES: Final[dict[str, Lie]] = {
    "nothing": _silent(),
    "half a status": _silent(b"HTTP/1.1 2"),
    "no body": _silent(OK + b"Content-Length: 2\r\n\r\n"),
    "closed at once": _once(b""),
    "no HTTP": _once(b"\x00\xff" * 50 + b"\r\n\r\n"),
    "dripping headers": _dripping(OK, b"X-A: b\r\n"),
    "endless headers": _endless(OK, b"X-A: b\r\n" * 1000),
    "one endless header": _endless(OK + b"X: ", b"x" * 65536),
    "endless continues": _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "dripping body": _dripping(OK + b"\r\n", b" "),
    "dripping body of a length": _dripping(OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "dripping events": _dripping(OK + b"\r\n", b": ping\n\n"),
    "dripping chunks": _dripping(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "endless body": _endless(OK + b"\r\n", b" " * MIB),
    "endless chunks": _endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "a huge length": _endless(OK + b"Content-Length: 1152921504606846976\r\n\r\n", b" " * MIB),
    "a negative length": _once(OK + b"Content-Length: -1\r\n\r\n{}"),
    "cut short": _once(OK + b"Content-Length: 100\r\n\r\n{}"),
    "a broken chunk": _once(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"),
    "a bomb": _body(gzip.compress(b" " * (256 * MIB), 1), headers=b"Content-Encoding: gzip\r\n"),
    "deep": _body(b"[" * 200_000),
    "a huge number": _body(b'{"reward": 1e999999}'),
    "no text": _body(b"\xff\xfe{}"),
    "null": _body(b"null"),
    "a redirection": _once(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
    "a dripping error": _dripping(b"HTTP/1.1 500 No\r\n\r\n", b"x"),
}
"""By what they send."""


@asynccontextmanager
async def lying_peer(lie: Lie) -> AsyncIterator[str]:
    """Yields its URL. Every connection is answered in the same way."""
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            async for piece in lie():
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The client has heard enough, or the test has.
        finally:
            talks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in list(talks):
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
