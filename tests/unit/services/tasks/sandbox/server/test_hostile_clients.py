"""Clients that take, send or say too little or too much: a sandbox is never kept from others for longer than ``idle_s``."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest

from gspo_services.tasks.sandbox import SandboxLimits
from gspo_services.tasks.sandbox.server import server as server_module
from gspo_services.tasks.sandbox.wire import INFO_PATH, SANDBOX_PATH, PutFiles, RunCommand, answer_of, packed
from tests.support.sandboxes import BOUNDS, ScriptedSandboxes, serving

LIMITS = SandboxLimits(wall_s=5, cpu_s=5)
IMPATIENT = replace(BOUNDS, idle_s=0.2)
UPGRADE = (
    f"GET {SANDBOX_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[Streams]:
    """A connection whose client speaks no HTTP of its own."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def frame(length: int, data: bytes) -> bytes:
    """The beginning of a binary message of a client, with a mask of zeros."""
    return b"\x82" + bytes([0xFF]) + struct.pack(">Q", length) + bytes(4) + data


async def is_served(url: str) -> bool:
    """Whether somebody else gets a sandbox."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url + SANDBOX_PATH) as socket:
        await socket.send_bytes(packed(RunCommand(["echo"], False, LIMITS), b""))
        return type(answer_of((await socket.receive()).data)).__name__ == "RunOutcome"


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/sandbox HTTP/1.1\r\nHost: x\r\nX-", b"GET /v1/info HTTP/1.1\r\nHost: x\r\n\r\nGET /v"]
)
async def test_half_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.1)
    async with serving(ScriptedSandboxes()) as (_, url, _), raw(url) as (reader, writer):
        writer.write(sent)
        await asyncio.wait_for(reader.read(), 20)
        assert reader.at_eof()


@pytest.mark.parametrize(
    "sent",
    [frame(100 << 20, b"x" * (1 << 20)), frame(1 << 40, b""), b"\x82\xff", b"\x89\x80\0\0\0\0" * 1000, b"\xff" * 1000],
)
async def test_half_a_message_and_no_message_keep_a_sandbox_for_a_while(sent: bytes) -> None:
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1, bounds=IMPATIENT) as (_, url, _), raw(url) as (reader, writer):
        writer.write(UPGRADE)
        assert b"101 Switching" in await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        assert await asyncio.wait_for(is_served(url), 20)


async def test_a_client_that_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLOSE_S", 0.1)
    sandboxes = ScriptedSandboxes(max_sandboxes=1)
    async with serving(sandboxes, max_sandboxes=1, bounds=IMPATIENT) as (_, url, _), raw(url) as (reader, writer):
        writer.write(UPGRADE)
        await reader.readuntil(b"\r\n\r\n")
        request = packed(RunCommand(["flood"], False, LIMITS), b"")
        writer.write(frame(len(request), request))
        assert await asyncio.wait_for(is_served(url), 20)
        taken = 0
        with suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(1 << 20), 20):
                taken += len(part)
        assert taken < 48 << 20


async def test_many_connections_leave_room_when_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SPARE_CONNECTIONS", 4)
    monkeypatch.setattr(server_module, "REQUEST_S", 0.5)
    async with serving(ScriptedSandboxes(), max_sandboxes=1, max_waiting=0) as (_, url, _):
        host, port = url.removeprefix("http://").split(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        await asyncio.gather(*(asyncio.wait_for(reader.read(), 20) for reader, _ in streams), return_exceptions=True)
        for _, writer in streams:
            writer.close()
        assert await asyncio.wait_for(is_served(url), 20)


@pytest.mark.parametrize(
    "text",
    [
        b'{"do":"run","x":NaN,"sizes":[]}',
        b'{"do":"put","names":["\\ud800"],"sizes":[0]}',
        b'{"do":"run","command":["a"],"prepares":false,"limits":{"memory_bytes":' + b"1" * 400 + b'},"sizes":[0]}',
        b'{"do":"run","command":["a"],"prepares":false,"limits":{"wall_s":1e999},"sizes":[0]}',
        b'{"sizes":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_headers_that_json_takes_and_we_do_not_are_refused(text: bytes) -> None:
    async with serving(ScriptedSandboxes()) as (_, url, _), aiohttp.ClientSession() as session:
        async with session.ws_connect(url + SANDBOX_PATH) as socket:
            await socket.send_bytes(struct.pack(">I", len(text)) + text)
            assert type(answer_of((await socket.receive()).data)).__name__ == "SandboxRefused"
            await socket.send_bytes(packed(PutFiles(["a"]), b"x"))
            assert type(answer_of((await socket.receive()).data)).__name__ == "SandboxDone"


async def test_a_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ScriptedSandboxes()) as (_, url, _), raw(url) as (reader, writer):
        writer.write(
            f"GET {INFO_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode() + os.urandom(1 << 16)
        )
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
