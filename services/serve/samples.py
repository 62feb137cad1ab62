"""The futures of samples: in memory, because a sample that is lost is asked for again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Final

import structlog

from gspo_services.rollout.sglang import EngineError
from gspo_services.serve.execution import failure
from gspo_services.serve.sampling import REFUSALS
from gspo_services.shared.runtime.errors import flatten

log = structlog.get_logger()

MAX_OPEN: Final = 4096
MAX_KEPT: Final = 16384
"""Answers that are kept for those who ask again."""


class SampleFutures:
    """What was asked for, by request id."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._open: dict[str, asyncio.Event] = {}
        self._answers: OrderedDict[str, bytes] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """Whether a new request has to wait outside."""
        return len(self._open) >= MAX_OPEN

    def knows(self, request_id: str) -> bool:
        """Whether this was asked for, and not forgotten."""
        return request_id in self._open or request_id in self._answers

    def begin(self, request_id: str, work: Awaitable[bytes]) -> None:
        """Do the work for a request that is not known yet."""
        self._open[request_id] = asyncio.Event()
        self._tasks.create_task(self._finish(request_id, work), name=request_id)

    def fail(self, request_id: str, text: str) -> None:
        """Answer a request that is not known yet with its failure."""
        self._keep(request_id, failure(text))

    async def answer(self, request_id: str, timeout_s: float) -> bytes | None:
        """Wait for an answer; None: not within ``timeout_s``. Raises: KeyError for a request that is not known."""
        if request_id not in self._answers:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._open[request_id].wait()
            except TimeoutError:
                return None
        return self._answers[request_id]

    async def _finish(self, request_id: str, work: Awaitable[bytes]) -> None:
        try:
            answer = await work
        except* REFUSALS as group:
            answer = failure("; ".join(dict.fromkeys(str(error) for error in flatten(group))))
        except* EngineError as group:
            log.error("sample_failed", request=request_id, error=str(group.exceptions[0]))
            answer = failure(str(flatten(group)[0]), "server")
        self._keep(request_id, answer)

    def _keep(self, request_id: str, answer: bytes) -> None:
        self._answers[request_id] = answer
        while len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)
        if (event := self._open.pop(request_id, None)) is not None:
            event.set()
