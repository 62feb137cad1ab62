"""A server of HTTP between clients that send half a request, and honest ones."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web

from gspo_services.shared.runtime.http_listener import listen

HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "
PATIENCE_S = 60.0
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def ok(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="ok")


@asynccontextmanager
async def served(handler: Handler, most: int, **options: float) -> AsyncIterator[int]:
    runner = await listen(handler, "127.0.0.1", 0, most, **options)  # type: ignore[arg-type]
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def half_sent(port: int, number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    try:
        for _, writer in pairs:
            writer.write(HALF)
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_thousands_of_half_sent_requests_keep_no_honest_client_out() -> None:
    async with served(ok, 64) as port, half_sent(port, 300) as hostile, ClientSession() as honest:
        for _ in range(3):
            assert await _text(honest, port) == "ok"
        for reader in hostile[: 300 - 64]:
            assert await ended(reader) == b""


async def test_a_request_that_is_worked_for_outlives_a_flood() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(_: web.BaseRequest) -> web.StreamResponse:
        begun.set()
        await release.wait()
        return web.Response(text="slow")

    async with served(slow, 8) as port, ClientSession() as honest, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(_text(honest, port))
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        async with half_sent(port, 40) as hostile:
            for reader in hostile[:32]:
                assert await ended(reader) == b""
            release.set()
            assert await asked == "slow"


async def _text(client: ClientSession, port: int) -> str:
    async with client.get(f"http://127.0.0.1:{port}/") as response:
        return await response.text()


async def test_a_head_that_does_not_end_in_time_is_cut_and_a_used_connection_is_not() -> None:
    async with served(ok, 8, head_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        async with half_sent(port, 1) as (silent,):
            assert await ended(silent) == b""
        writer.write(HALF + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


async def test_connections_leave_half_of_the_open_files_to_the_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        async with served(ok, 4096) as port:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            async with half_sent(port, 130) as hostile:
                assert await ended(hostile[0]) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
