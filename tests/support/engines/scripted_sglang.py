"""An SGLang server over HTTP that says what a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gspo_services.rollout.sglang.client import (
    Engine,
)
from gspo_services.rollout.sglang.generation import GenerateRequest, OutputPiece, SamplingParameters

INFO = {
    "version": "0.5.23", "device": "cpu", "dtype": "float32", "tp_size": 1, "model_path": "/m",
    "incremental_streaming_output": True, "enable_deterministic_inference": True,
}  # fmt: skip


def answer(status: int, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content)


def event(token_ids: list[int], total: int, finish: str | None = None, version: str = "1") -> dict[str, Any]:
    return {
        "output_ids": token_ids,
        "meta_info": {
            "completion_tokens": total,
            "weight_version": version,
            "finish_reason": None if finish is None else {"type": finish},
            "output_token_logprobs": [[-1.0, token, None] for token in token_ids],
        },
    }


def stream(*events: dict[str, Any]) -> bytes:
    """A streamed answer that the server breaks off after its events."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(
        b"data: " + json.dumps(event).encode() + b"\n\n" for event in events
    )


@asynccontextmanager
async def scripted(
    reply: Callable[[str, Any], bytes | Awaitable[bytes]], *, served_version: str = "1", **options: Any
) -> AsyncIterator[tuple[Engine, list[tuple[str, Any]]]]:
    """An engine client, and its requests to a server that answers ``reply(path, body)`` and closes the connection."""
    asked: list[tuple[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        lengths = [int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")]
        body = json.loads(await reader.readexactly(lengths[0])) if lengths and lengths[0] else None
        asked.append((path, body))
        if path == "/server_info":
            writer.write(answer(200, INFO))
        elif path == "/model_info":
            writer.write(answer(200, {"weight_version": served_version}))
        else:
            made = reply(path, body)
            writer.write(made if isinstance(made, bytes) else await made)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with Engine(f"http://127.0.0.1:{port}", **{"vocab_size": 100, "chunk_tokens": 4, **options}) as engine:
            yield engine, asked


async def ask(engine: Engine, num_tokens: int = 3, **sampling: Any) -> list[OutputPiece]:
    request = GenerateRequest(rid="r", input_ids=[1], sampling=SamplingParameters(max_new_tokens=num_tokens, **sampling))
    return [piece async for piece in engine.generate(request)]
