"""Runs agents that are services of their own: one HTTP request for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Final

import aiohttp
import msgspec

from services.user_code.answers import MAX_ANSWER_BYTES, answered
from services.user_code.results import AgentResult, AgentTask, failed

_CONNECT_S: Final = 10.0
_SHOWN_CHARS: Final = 500


class AgentService:
    """POSTs each episode as {"task", "seed", "base_url", "api_key", "model"} and expects {"reward": ...}: a number or a map.

    Use it as an asynchronous context manager. There is no limit on requests at a time: whoever calls has one.
    """

    def __init__(self, url: str, weights: Mapping[str, float] | None = None) -> None:
        """``weights``: as in UserProcessOptions."""
        self._url = url
        self._weights = weights
        self._opened: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AgentService:
        self._opened = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def solve(self, task: AgentTask) -> AgentResult:
        """The result of one episode. A cancelled call, like a deadline, closes the connection: that is all a service hears.

        waits for:    the service's answer
        unblocked by: the deadline
        """
        try:
            async with asyncio.timeout(task.deadline_s):
                return await self._post(task)
        except TimeoutError:
            return failed("deadline", f"{self._url} did not answer within {task.deadline_s} s")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return failed("unreachable", f"{self._url}: {error}")
        except (aiohttp.ClientError, ValueError) as error:
            return failed("refused", f"{self._url}: {type(error).__name__}: {error}")

    async def _post(self, task: AgentTask) -> AgentResult:
        if self._opened is None:
            raise RuntimeError("the service's client is used outside of its context")
        fields = msgspec.structs.asdict(task)
        del fields["deadline_s"]
        async with self._opened.post(
            self._url, data=msgspec.json.encode(fields), headers={"Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S), allow_redirects=False,
        ) as response:  # fmt: skip
            body = bytearray()
            async for piece in response.content.iter_chunked(MAX_ANSWER_BYTES):
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    break
            if response.status != 200:
                shown = body[:_SHOWN_CHARS].decode(errors="replace")
                return failed("refused", f"{self._url} answered {response.status}: {shown}")
            return answered(bytes(body), f"the answer of {self._url}", self._weights)
