"""Agents on a running RolloutService between a scripted broker and a scripted engine: real workers, the real endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gspo_protocol.channels import WORK
from gspo_protocol.limits import trajectory_limits
from gspo_services.rollout.agents import open_agents, open_solver
from gspo_services.rollout.episodes import EpisodeShared
from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.runtime.clock import MonotonicClock
from gspo_services.shared.settings.configuration import validated
from tests.support.processes.running_rollout import Running
from tests.support.wire.zmq_ends import in_background, zmq_context

Agents = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


def agents_starter(tokenizer: ChatTokenizer, directory: Path) -> Agents:
    """Starts such a rollout as a context; options go to the section ``agent``."""

    @contextlib.asynccontextmanager
    async def start(drain_s: float = 5.0, max_running: int = 4, **agent: Any) -> AsyncIterator[Running]:
        settings = validated(
            {
                "run": {"directory": str(directory)},
                "model": {"path": str(tokenizer.directory)},
                "sampling": {"max_turn_tokens": 6, "max_tokens": 512, "max_episode_tokens": 2048},
                "rollout": {"max_running": max_running, "drain_s": drain_s},
                "agent": {"workers": 1, **agent},
            },
            "test",
        )
        async with zmq_context() as context:
            run = Running(context, tokenizer, WORK, drain_s, max_running)
            shared = EpisodeShared(
                renderer=create_renderer(tokenizer), engine=run.engine, broker=run.client,  # type: ignore[arg-type]
                may_generate=run.sync.may_generate, limits=trajectory_limits(256),
                chunk_tokens=4, metrics=run.metrics, wall_s=lambda: 1_700_000_000.0,
                on_replay=settings.agent.on_replay, roles=settings.agent.roles,
            )  # fmt: skip
            async with in_background(run.broker.serve()):
                async with (
                    open_solver(settings, "rollout-0") as solve,
                    open_agents(settings, shared, solve, registry=run.registry, clock=MonotonicClock()) as episodes,
                    asyncio.TaskGroup() as tasks,
                ):
                    tasks.create_task(run.serve(episodes))
                    try:
                        yield run
                    finally:
                        run.stop.set()

    return start
