"""An attacker among the agents: what it does in its episode, before it plays it as others do.

Each act is noted in the file GSPO_STORM_NOTES. An answer that no attacker may get is noted as a breach: another episode's
tokens, or an internal error.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from gspo.tasks.agents import Episode

ONE_IN: Final = 24
"""Of so many tasks, one is an attacker's."""
BREACH: Final = "BREACH"
DAEMON: Final = "gspo-storm-daemon"
ANSWER_S: Final = 30.0
ENDLESS_S: Final = 0.5
CALL: Final = "/chat/completions"
INTERNAL: Final = 500
ENDED_S: Final = 30.0
"""More than agent.deadline_s: an episode that began so long ago has ended."""
BEGUN: Final[deque[tuple[float, str]]] = deque(maxlen=64)
"""When this process's attackers began, and their keys. A worker's episodes can always take each other's keys."""
LEFT_OPEN: Final[deque[asyncio.StreamWriter]] = deque(maxlen=64)
"""Connections that nobody closes."""

Act = Callable[[Episode, random.Random], Awaitable[None]]


def is_hostile(problem: str) -> bool:
    """Whether a task's episodes are an attacker's; the same in every process."""
    return zlib.crc32(problem.encode()) % ONE_IN == 0


def note(text: str) -> None:
    """Add a line to the notes, in one write."""
    descriptor = os.open(os.environ["GSPO_STORM_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def start_daemon() -> None:
    """Start a process that outlives its parent."""
    os.posix_spawn("/bin/sleep", [DAEMON, "100000"], os.environ, setsid=True)


async def attack(episode: Episode, rng: random.Random) -> None:
    """One act. A connection that is refused or cut is what an attacker has to expect."""
    act = rng.choices(list(ACTS), weights=list(ACTS.values()))[0]
    note(act.__name__)
    BEGUN.append((time.monotonic(), episode.api_key))
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        await act(episode, rng)


async def opened(episode: Episode, headers: str, path: str = CALL, key: str = "") -> Any:
    """A connection with the head of a request in it."""
    address = urlsplit(episode.base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Authorization: Bearer {key or episode.api_key}\r\n{headers}\r\n".encode("latin-1"))
    return reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the answer; an internal error is a breach."""
    async with asyncio.timeout(ANSWER_S):
        line = await reader.readline()
    status = int(line.split()[1]) if line else 0
    if status == INTERNAL:
        note(f"{BREACH}: an internal error: {(await reader.read(2000))!r}")
    return status


async def post(episode: Episode, body: bytes, path: str = CALL, key: str = "") -> int:
    """The status of a whole request."""
    reader, writer = await opened(episode, f"Content-Length: {len(body)}\r\nConnection: close\r\n", path, key)
    try:
        writer.write(body)
        await writer.drain()
        return await status_of(reader)
    finally:
        writer.close()


def call(episode: Episode, content: Any = "1+1=", **fields: Any) -> bytes:
    """A usual request, or one with something else in it."""
    return json.dumps({"model": episode.model, "messages": [{"role": "user", "content": content}], **fields}).encode()


async def half_a_body(episode: Episode, rng: random.Random) -> None:
    """A tenth of what was announced, and then silence."""
    _, writer = await opened(episode, "Content-Length: 100000\r\n")
    writer.write(call(episode, "1" * 10_000))
    LEFT_OPEN.append(writer)


async def endless_body(episode: Episode, rng: random.Random) -> None:
    """Chunks without an end, as fast as they are taken."""
    _, writer = await opened(episode, "Transfer-Encoding: chunked\r\n")
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDLESS_S):
            while True:
                writer.write(piece)
                await writer.drain()
    writer.transport.abort()


async def strange_keys(episode: Episode, rng: random.Random) -> None:
    """Keys of episodes that have ended, damaged ones, and guesses. None may be answered."""
    own = episode.api_key
    damaged = own[:-1] + ("0" if own[-1] != "0" else "1")
    ended = [key for begun, key in BEGUN if begun < time.monotonic() - ENDED_S][-4:]
    for key in (*ended, damaged, own[:-1], own + own, own.swapcase(), "0", "*", "../" * 20, "a" * 4000):
        status = await post(episode, call(episode), key=key)
        if status == 200:
            note(f"{BREACH}: a call with the key {key[:40]!r} was answered in an episode whose key is {own!r}")


async def forged_ids(episode: Episode, rng: random.Random) -> None:
    """Ids, paths and bodies that nobody has given out."""
    said = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "../../1", "type": "function", "function": {"name": "\x1b[2J", "arguments": "{" * 500}}
    ]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "another episode's", "content": "[/bold]"}
    bodies = [
        call(episode, model="other", user="x" * 10_000, metadata={"trajectory_id": "7"}, n=10**9),
        json.dumps({"model": episode.model, "messages": [{"role": "user", "content": "1"}, said, result]}).encode(),
        call(episode, [{"type": "text", "text": "\ud800"}]),
        call(episode, max_tokens=-1),
        call(episode, temperature=float("nan")),
        b"[" * 100_000,
        b'{"model": 1e999999, "messages": ' + b'[{"role":' * 5000,
        rng.randbytes(1000),
    ]
    for body in bodies:
        await post(episode, body)
    for path in ("/models/../../../etc/passwd", "/trajectories/7", "/chat/completions/" + "%2e" * 2000):
        await post(episode, b"{}", path)


async def huge_text(episode: Episode, rng: random.Random) -> None:
    """More text than any sequence may have, within the limit of a body."""
    await post(episode, call(episode, "1+" * 1_500_000))


async def goes_away(episode: Episode, rng: random.Random) -> None:
    """A call, and nobody there for its answer."""
    body = call(episode, stream=rng.random() < 0.5)
    _, writer = await opened(episode, f"Content-Length: {len(body)}\r\n")
    writer.write(body)
    await writer.drain()
    await asyncio.sleep(rng.uniform(0.0, 0.1))
    writer.transport.abort()


async def daemonises(episode: Episode, rng: random.Random) -> None:
    """A process in a session of its own that never ends."""
    start_daemon()


async def blocks(episode: Episode, rng: random.Random) -> None:
    """The loop of its worker does nothing else meanwhile, whatever others wait for."""
    signal.sigtimedwait([signal.SIGUSR1], 1.0)


async def dies(episode: Episode, rng: random.Random) -> None:
    """A daemon is left, and the worker is gone, with all of its episodes."""
    start_daemon()
    os.kill(os.getpid(), signal.SIGKILL)


async def never_ends(episode: Episode, rng: random.Random) -> None:
    """Only its deadline ends it."""
    await asyncio.Event().wait()


ACTS: Final[dict[Act, int]] = {
    half_a_body: 6, endless_body: 3, strange_keys: 4, forged_ids: 4, huge_text: 2, goes_away: 6, daemonises: 4, blocks: 3,
    dies: 1, never_ends: 1,
}  # fmt: skip
