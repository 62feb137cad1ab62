"""Opens what agents need, from the configuration: the endpoint, and the processes or service that solve episodes."""

import os
import shutil
from asyncio import TaskGroup
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry

from gspo_services.rollout.agents.runner import AgentEpisodes, AgentTerms, Solve
from gspo_services.rollout.endpoint import EndpointLimits, EndpointMetrics, EndpointServer, RunSampling
from gspo_services.rollout.episodes import EpisodeRegistry, EpisodeShared
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError
from gspo_services.shared.runtime.user_modules import users_folder
from gspo_services.shared.settings import AgentSection, Settings
from gspo_services.tasks.agents import (
    AgentPool,
    AgentPoolOptions,
    AgentProgram,
    AgentService,
    ProcessLimits,
    UserOutput,
    UserProcessOptions,
)
from gspo_services.tasks.computers import ComputerOptions
from gspo_services.tasks.sandbox import open_configured

CALLS_PER_EPISODE: Final = 4
"""Connections of the endpoint for each episode; agents with concurrent calls keep a few more."""


@asynccontextmanager
async def open_agents(
    settings: Settings, shared: EpisodeShared, solve: Solve, *, registry: CollectorRegistry, clock: Clock
) -> AsyncIterator[AgentEpisodes]:
    """Open the agents' episodes on one rollout until the context ends. Raises: EndpointError when it cannot listen."""
    agent = settings.agent
    episodes = EpisodeRegistry(settings.model.path.name, agent.roles)
    server = EndpointServer(
        episodes,
        EndpointMetrics(registry),
        host=agent.host,
        port=agent.port,
        sampling=RunSampling(strict=agent.strict),
        limits=EndpointLimits(max_connections=max(1024, CALLS_PER_EPISODE * settings.rollout.max_running)),
        clock=clock,
    )
    await server.start()
    try:
        yield AgentEpisodes(
            shared=shared,
            registry=episodes,
            base_url=agent.advertised_url or server.base_url,
            refuse_calls=server.stop,
            solve=solve,
            terms=AgentTerms(deadline_s=agent.deadline_s, on_deadline=agent.on_deadline),
        )
    finally:
        await server.stop()


def require_agent(agent: AgentSection) -> None:
    """Raises: ConfigurationError when the program or the interpreter does not exist."""
    folder = users_folder()
    for key, start, program in (("agent.command", folder, agent.command[:1]), ("agent.python", "", [agent.python])):
        for path in filter(None, program):
            if shutil.which(os.path.join(start, path) if "/" in path else path) is None:
                raise ConfigurationError(
                    f"{key} is {path!r}: no such program; give a path that starts at {folder}, or a name in PATH"
                )


@asynccontextmanager
async def open_solver(settings: Settings, name: str) -> AsyncIterator[Solve]:
    """Open the solver that runs the agent on rollout ``name``: rollout.max_running episodes at a time.

    Raises: ConfigurationError when the agent cannot be run; a function is imported first, so that this is known at once.
    ServiceError when its worker ended otherwise, as by a signal: another start may go well.
    """
    agent, most = settings.agent, settings.rollout.max_running
    require_agent(agent)
    output = UserOutput(settings.run.directory / "logs" / f"{name}-agents.log", settings.run.log_bytes)
    weights = agent.weights or None
    if agent.url:
        async with AgentService(agent.url, weights) as service:
            yield lambda task, journal, *, is_alone: service.solve(task)
        return
    options = UserProcessOptions(
        limits=ProcessLimits(memory_bytes=agent.memory_bytes, cpu_s=agent.cpu_s),
        environment=agent.environment,
        scratch=agent.scratch,
        weights=weights,
    )
    if agent.command:
        program = AgentProgram(agent.command, options, num_processes=most, output=output)
        yield lambda task, journal, *, is_alone: program.solve(task)
        return
    pool_options = AgentPoolOptions(
        **msgspec.structs.asdict(options),
        num_workers=agent.workers,
        episodes_per_worker=-(-most // agent.workers),
        python=agent.python or None,
        hang_s=agent.hang_s,
    )
    async with (
        _open_computers(settings) as computers,
        TaskGroup() as tasks,
        AgentPool(agent.function, pool_options, tasks=tasks, output=output, computers=computers) as pool,
    ):
        unusable = await pool.first_worker()
        if unusable is not None:
            error = ConfigurationError if unusable.is_proven else ServiceError
            raise error(f"agent.function is {agent.function!r}: {unusable.detail}")
        yield pool.solve


@asynccontextmanager
async def _open_computers(settings: Settings) -> AsyncIterator[ComputerOptions | None]:
    """What episodes' computers need; None without ``agent.computer``. Raises: ConfigurationError with the way out."""
    if not settings.agent.computer:
        yield None
        return
    opened = False
    try:
        async with open_configured(settings.sandbox) as sandboxes:
            opened = True
            yield ComputerOptions(
                sandboxes=sandboxes,
                max_bytes=settings.agent.computer_bytes,
                memory_bytes=settings.agent.computer_memory_bytes,
                max_wall_s=settings.sandbox.max_wall_s,
            )
    except ConfigurationError as error:
        raise error if opened else type(error)(f"agent.computer is true: {error}") from error
