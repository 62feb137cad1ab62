"""CPU that the rollout's endpoint takes for a call and for a streamed token, with episodes that answer at once.

    python -m benchmarks.endpoint_cost

The server has a process of its own, whose CPU time is counted; the load comes from this one, over one connection.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator

import psutil
from prometheus_client import CollectorRegistry

from gspo_services.rollout.endpoint import CallAnswer, CallDelta, CallRequest, EndpointMetrics, EndpointServer

STREAMED_TOKENS = 2000
NUM_TOKENS = 100
PROMPT = "Some text of a user or a tool, as long as a short line of a file that an agent reads. "
FIXED = {"id": "call", "created": 0, "reasoning": None, "tool_calls": [], "finish_reason": "stop", "prompt_tokens": 9}


class Instant:
    """Answers at once: with ``max_tokens`` deltas of one token each if there is such a limit, else whole."""

    model = "tiny"

    def calls_of(self, key: str) -> "Instant":
        return self

    async def call(self, request: CallRequest) -> AsyncGenerator[CallDelta | CallAnswer, None]:
        pieces = request.max_tokens or 0
        for _ in range(pieces):
            yield CallDelta(id="call", created=0, content="word ")
        number = pieces or NUM_TOKENS
        yield CallAnswer(
            **FIXED,
            content="word " * number,
            token_ids=[1] * number,
            tokens=["word "] * number,
            logprobs=[-0.5] * number,
        )


async def serve() -> None:
    server = EndpointServer(Instant(), EndpointMetrics(CollectorRegistry()))
    await server.start()
    print(server.base_url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


def body(num_messages: int, **fields: object) -> bytes:
    messages = [{"role": role, "content": PROMPT * 4} for _ in range(num_messages // 2) for role in ("user", "assistant")]
    return json.dumps({"model": "tiny", "messages": [*messages, {"role": "user", "content": PROMPT}], **fields}).encode()


async def measure() -> None:
    """Print microseconds of the server's CPU for each kind of call."""
    command = (sys.executable, "-m", "benchmarks.endpoint_cost", "--serve")
    server = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    port = (await server.stdout.readline()).decode().strip().removesuffix("/v1").rpartition(":")[2]
    process = psutil.Process(server.pid)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port), limit=2**24)

    async def cost(content: bytes, repeats: int, end: bytes) -> float:
        lines = (
            "POST /v1/chat/completions HTTP/1.1",
            "host: x",
            "authorization: Bearer k",
            f"content-length: {len(content)}",
        )
        head = "\r\n".join(lines) + "\r\n\r\n"
        before = 0.0
        for index in range(-repeats // 10, repeats):
            if index == 0:
                before = sum(process.cpu_times()[:2])
            writer.write(head.encode() + content)
            await reader.readuntil(end)
        return (sum(process.cpu_times()[:2]) - before) / repeats * 1e6

    whole = b'"total_tokens":109}}'
    for what, content in (
        ("a call with one message", body(0)),
        ("a call with 101 messages", body(100)),
        (f"a call with the log-probs of {NUM_TOKENS} tokens", body(0, logprobs=True)),
    ):
        print(f"{what} ({len(content):,} bytes): {await cost(content, 2000, whole):.0f} us")
    streamed = await cost(body(0, stream=True, max_tokens=STREAMED_TOKENS), 30, b"0\r\n\r\n")
    print(f"a stream of {STREAMED_TOKENS} pieces of one token, for each: {streamed / STREAMED_TOKENS:.1f} us")
    writer.close()
    server.stdin.close()
    await server.wait()


if __name__ == "__main__":
    asyncio.run(serve() if "--serve" in sys.argv else measure())
