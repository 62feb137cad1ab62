"""A pool of agents' workers for a test, and tasks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from gspo_services.tasks.agents import AgentPool, AgentPoolOptions, AgentTask, RecordedStep, UserOutput
from gspo_services.tasks.computers import ComputerOptions


def agent_task(do: str, deadline_s: float = 60.0, seed: int = 7, **fields: Any) -> AgentTask:
    """An episode of ``tests.support.agents.act``."""
    return AgentTask(
        task={"do": do, **fields}, seed=seed, base_url="http://127.0.0.1:9/v1", api_key="episode-key", model="policy",
        roles=["white", "black"], deadline_s=deadline_s,
    )  # fmt: skip


@asynccontextmanager
async def agent_pool(
    function: str = "act", output: Path | None = None, computers: ComputerOptions | None = None, **options: Any
) -> AsyncIterator[AgentPool]:
    """Workers that run a function of ``tests.support.agents``; none of their processes is left when the context ends."""
    values = {"num_workers": 1, "heartbeat_s": 0.1, "grace_s": 0.5, "hang_s": 2.0} | options
    before = set(psutil.Process().children(recursive=True))
    async with asyncio.TaskGroup() as tasks:
        function = function if ":" in function else f"tests.support.agents:{function}"
        async with AgentPool(
            function, AgentPoolOptions(**values), tasks=tasks, output=UserOutput(output), computers=computers
        ) as pool:
            yield pool
    assert set(psutil.Process().children(recursive=True)) <= before


class ListJournal:
    """A journal in memory; ``calls`` has what was asked of it."""

    def __init__(self, *recorded: RecordedStep) -> None:
        self.recorded: list[RecordedStep] = list(recorded)
        self.calls: list[tuple[Any, ...]] = []

    async def record(self, step: RecordedStep, ordinal: int) -> None:
        self.calls.append(("record", step.name, ordinal, step.result))

    async def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        self.calls.append(("diverged", ordinal, recorded, name))
