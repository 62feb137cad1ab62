"""An episode's session at an OpenEnv server that may restart: it waits, begins again, and repeats what was done."""

import asyncio
import importlib
import random
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from openai import DefaultAsyncHttpxClient
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidHandshake, InvalidStatus

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of a worker: making one takes longer than a call."""
HTTPX: Any = importlib.import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
"""The library of that client, httpx or httpx2, as the version of openai has it: each has errors of its own."""
FULL_PAUSE_S = 1.0
"""Between two attempts to enter a server that has no free place."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
CONNECT_S = 10.0
DEADLINE_MARGIN_S = 1.0
"""So long before its deadline an episode says that the server is away: the deadline itself says nothing about it."""
AWAY_STATUSES = (502, 503, 504)
"""What a proxy answers while the server behind it is away."""

T = TypeVar("T")
_awaited: set[str] = set()
"""Servers that this worker has said to wait for."""


class OpenEnvOptions(NamedTuple):
    """How a server is played; the block ``openenv`` of a row."""

    url: str
    system_prompt: str = ""
    """The system message. Without it, the policy is told the JSON schema of an action, unless it answers with one value."""
    observation_field: str = ""
    """The field of an observation that the policy reads; "": all of them, as JSON."""
    action_field: str = ""
    """The field of an action that the policy's answer is; "": the answer is an action as JSON, or the value of the one field
    that the server requires."""
    max_turns: int = 32
    timeout_s: float = 60.0
    """For one reset or step of the server."""
    patience_s: float = 300.0
    """How long a server may be away at a time."""


class _Full(Exception):
    """The server has no free place."""


class Session:
    """A connection of its own to the server, which is made again when it is lost.

    The server forgets the state of a lost session: the same reset and the same actions follow, and must bring the same
    results. Errors of all methods: ConnectionError when the server stays away; TimeoutError when it does not answer;
    RuntimeError when it reports an error or does not come out the same.
    """

    def __init__(self, options: OpenEnvOptions, reset: dict[str, Any], remaining_s: Callable[[], float]) -> None:
        """``remaining_s``: seconds until the episode's deadline."""
        self._options = options
        self._reset = reset
        self._remaining_s = remaining_s
        self._server: Any = None
        self._seen: list[tuple[dict[str, Any] | None, Any]] = []
        """Each action, None for the reset, and its result."""

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    async def action_schema(self) -> dict[str, Any]:
        """The JSON schema of an action."""

        async def asked() -> dict[str, Any]:
            response = await HTTP.get(f"{self._options.url.rstrip('/')}/schema", timeout=self._options.timeout_s)
            response.raise_for_status()
            schema: dict[str, Any] = response.json()["action"]
            return schema

        return await self._patiently(asked)

    async def reset(self) -> Any:
        """Begin; returns the result with the first observation. It waits while the server has no free place."""
        return await self._do(None)

    async def step(self, action: dict[str, Any]) -> Any:
        """The result of an action."""
        return await self._do(action)

    async def _do(self, action: dict[str, Any] | None) -> Any:
        async def done() -> Any:
            if self._server is None:
                await self._enter()
                await self._repeat()
            return await self._sent(action)

        result = await self._patiently(done)
        self._seen.append((action, result))
        return result

    async def _enter(self) -> None:
        connect_s = max(0.1, min(CONNECT_S, self._remaining_s()))
        server = GenericEnvClient(
            self._options.url, connect_timeout_s=connect_s, message_timeout_s=self._options.timeout_s, mode="simulation"
        )
        await server.connect()
        self._server = server

    async def _leave(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _repeat(self) -> None:
        """Bring a new session to where the lost one was. Raises: RuntimeError when a result is another."""
        for place, (action, seen) in enumerate(self._seen):
            now = await self._sent(action)
            if now != seen:
                what = "reset" if action is None else f"action {place} ({str(action)[:200]})"
                raise RuntimeError(
                    f"the server at {self._options.url} lost the session and does not come out the same: its answer to "
                    f"{what} was {str(seen)[:300]} and is now {str(now)[:300]}"
                )

    async def _sent(self, action: dict[str, Any] | None) -> Any:
        """Send an action, or the reset. Raises: _Full."""
        try:
            return await (self._server.reset(**self._reset) if action is None else self._server.step(action))
        except TimeoutError as error:
            what = "reset" if action is None else "a step"
            text = f"the server at {self._options.url} did not answer {what} within {self._options.timeout_s} s (timeout_s)"
            raise TimeoutError(text) from error
        except RuntimeError as error:
            if action is not None:
                raise
            said = str(error)
        except ConnectionClosedOK:
            if action is not None:
                raise
            # A full server says so and hangs up, mostly before it has read anything: the client's own methods miss it.
            said = str(await self._server._receive())
        if "CAPACITY_REACHED" in said:
            raise _Full
        raise RuntimeError(f"the server did not begin an episode: {said}")

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until the server is there. Raises: ConnectionError when it is away too long, and what ``attempt`` raises."""
        url, lost_at, pause_s = self._options.url, None, FIRST_PAUSE_S
        while True:
            try:
                result = await attempt()
            except _Full:
                await self._leave()
                lost_at, pause_s = None, FIRST_PAUSE_S
                await asyncio.sleep(FULL_PAUSE_S)
                continue
            except (OSError, ConnectionClosed, HTTPX.HTTPError) as error:
                if not _is_away(error):
                    raise
                await self._leave()
                lost_at = time.monotonic() if lost_at is None else lost_at
                away_s = time.monotonic() - lost_at
                if away_s + pause_s > self._options.patience_s or pause_s + DEADLINE_MARGIN_S > self._remaining_s():
                    _awaited.discard(url)
                    raise ConnectionError(
                        f"the server at {url} has been away for {away_s:.1f} s; patience_s is "
                        f"{self._options.patience_s:g}, and the episode had {self._remaining_s():.0f} s left: {error}"
                    ) from error
                if url not in _awaited:
                    _awaited.add(url)
                    sys.stdout.write(f"openenv: the server at {url} is away ({error}): episodes wait for it\n")
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if url in _awaited:
                _awaited.discard(url)
                sys.stdout.write(f"openenv: the server at {url} is there again\n")
            return result


def _is_away(error: Exception) -> bool:
    """Whether the server, or the way to it, may be there again later."""
    if type(error) is TimeoutError:
        return False  # It is there, and too slow.
    cause = error.__cause__ if type(error) is ConnectionError else error
    if isinstance(cause, InvalidStatus):
        return cause.response.status_code in AWAY_STATUSES
    if isinstance(cause, HTTPX.HTTPStatusError):
        return cause.response.status_code in AWAY_STATUSES
    if isinstance(cause, ssl.SSLCertVerificationError):
        return False
    return isinstance(cause, (OSError, ConnectionClosed, InvalidHandshake, HTTPX.TransportError))
