"""Runs agents that are services of their own: one HTTP request for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType

import msgspec

from gspo_services.shared.runtime.plain_text import without_passwords
from gspo_services.tasks.agents.results import AgentResult, AgentTask, answered, failed
from gspo_services.tasks.json_rewards import JsonClient, UnansweredError


class AgentService:
    """POSTs each episode as {"task", "seed", "base_url", "api_key", "model"} and expects {"reward": ...}: a number or a map.

    Use it as an asynchronous context manager. There is no limit on requests at a time: whoever calls has one.
    """

    def __init__(self, url: str, weights: Mapping[str, float] | None = None) -> None:
        """``weights``: as in UserProcessOptions."""
        self._url = url
        self._shown = without_passwords(url)
        self._weights = weights
        self._client = JsonClient()

    async def __aenter__(self) -> AgentService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def solve(self, task: AgentTask) -> AgentResult:
        """The result of one episode. A cancelled call, like a deadline, closes the connection: that is all a service hears.

        waits for:    the service's answer
        unblocked by: the deadline
        """
        fields = msgspec.structs.asdict(task)
        del fields["deadline_s"], fields["roles"]
        try:
            async with asyncio.timeout(task.deadline_s):
                body = await self._client.post(self._url, msgspec.json.encode(fields))
        except TimeoutError:
            return failed("deadline", f"{self._shown} did not answer within {task.deadline_s} s")
        except UnansweredError as error:
            return failed(error.reason, str(error))
        return answered(body, f"the answer of {self._shown}", self._weights)
