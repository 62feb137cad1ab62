"""Opens what agents need, as the configuration says: the endpoint, and the processes or the service that solve episodes."""

import shutil
from asyncio import TaskGroup
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry

from services.rollout.agents.runner import AgentEpisodes, AgentTerms, Solve
from services.rollout.endpoint import EndpointLimits, EndpointMetrics, EndpointServer, RunSampling
from services.rollout.episodes import EpisodeRegistry, EpisodeShared
from services.runtime.clock import Clock
from services.runtime.errors import ConfigurationError
from services.runtime.settings import AgentSection, Settings
from services.user_code import (
    AgentPool,
    AgentPoolOptions,
    AgentProgram,
    AgentService,
    ProcessLimits,
    UserOutput,
    UserProcessOptions,
)

CALLS_PER_EPISODE: Final = 4
"""Connections of the endpoint for each episode; agents that call side by side keep some more."""


@asynccontextmanager
async def open_agents(
    settings: Settings, shared: EpisodeShared, *, name: str, registry: CollectorRegistry, clock: Clock
) -> AsyncIterator[AgentEpisodes]:
    """The episodes of agents on the rollout called ``name``, until the context ends.

    Raises: ConfigurationError when the agent cannot be run; EndpointError when the endpoint cannot listen.
    """
    agent, sampling = settings.agent, settings.sampling
    require_agent(agent)
    episodes = EpisodeRegistry(settings.model.path.name)
    server = EndpointServer(
        episodes,
        EndpointMetrics(registry),
        host=agent.host,
        port=agent.port,
        sampling=RunSampling(temperature=sampling.temperature, strict=agent.strict),
        limits=EndpointLimits(max_connections=max(1024, CALLS_PER_EPISODE * settings.rollout.max_running)),
        clock=clock,
    )
    output = UserOutput(settings.run.directory / "logs" / f"{name}-agents.log", settings.run.log_bytes)
    async with AsyncExitStack() as stack:
        solve = await stack.enter_async_context(_solving(agent, settings.rollout.max_running, output))
        await server.start()
        stack.push_async_callback(server.stop)
        terms = AgentTerms(deadline_s=agent.deadline_s, on_deadline=agent.on_deadline)
        url = agent.advertised_url or server.base_url
        yield AgentEpisodes(
            shared=shared, registry=episodes, base_url=url, refuse_calls=server.stop, solve=solve, terms=terms
        )


def require_agent(agent: AgentSection) -> None:
    """Raises: ConfigurationError when the program or the interpreter is not there."""
    for key, program in (("agent.command", agent.command[:1]), ("agent.python", [agent.python][: bool(agent.python)])):
        for path in program:
            if shutil.which(path) is None:
                raise ConfigurationError(
                    f"{key} is {path!r}: no such program; give a path that starts at {Path.cwd()}, or a name in PATH"
                )


@asynccontextmanager
async def _solving(agent: AgentSection, most: int, output: UserOutput) -> AsyncIterator[Solve]:
    """``most`` episodes at a time."""
    weights = agent.weights or None
    if agent.url:
        async with AgentService(agent.url, weights) as service:
            yield lambda task, journal: service.solve(task)
        return
    options = UserProcessOptions(
        limits=ProcessLimits(memory_bytes=agent.memory_bytes, cpu_s=agent.cpu_s),
        environment=agent.environment,
        scratch=agent.scratch,
        weights=weights,
    )
    if agent.command:
        program = AgentProgram(agent.command, options, num_processes=most, output=output)
        yield lambda task, journal: program.solve(task)
        return
    pool_options = AgentPoolOptions(
        **msgspec.structs.asdict(options),
        num_workers=agent.workers,
        episodes_per_worker=-(-most // agent.workers),
        python=agent.python or None,
    )
    async with TaskGroup() as tasks, AgentPool(agent.function, pool_options, tasks=tasks, output=output) as pool:
        yield pool.solve
