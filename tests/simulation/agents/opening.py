"""The episodes of agents on one simulated rollout."""

import asyncio
import random
from typing import Any

from gspo_protocol.limits import trajectory_limits
from gspo_services.rollout.agents import AgentEpisodes, AgentTerms
from gspo_services.rollout.episodes import EpisodeRegistry, EpisodeShared
from gspo_services.rollout.metrics import RolloutMetrics
from tests.simulation.agents.chat import SimRenderer
from tests.simulation.agents.endpoint import SimEndpoint
from tests.simulation.agents.solving import SimSolver
from tests.simulation.engine import SimEngine, SimRewards
from tests.simulation.loop import Process
from tests.simulation.processes.machinery import Machinery

DEADLINE_S = 60.0


def open_agents(
    machinery: Machinery,
    process: Process,
    rng: random.Random,
    *,
    engine: SimEngine,
    rewards: SimRewards,
    broker: Any,
    may_generate: asyncio.Event,
    metrics: RolloutMetrics,
) -> AgentEpisodes:
    """The real episodes behind the doubles of the endpoint and of the user's code."""
    settings = machinery.settings
    registry = EpisodeRegistry("simulated")
    endpoint = SimEndpoint(registry, rng, machinery.audit.happened)
    solver = SimSolver(process, registry, endpoint, rewards, machinery.audit)
    shared = EpisodeShared(
        renderer=SimRenderer(),
        engine=engine,
        broker=broker,
        may_generate=may_generate,
        limits=trajectory_limits(settings.batch.groups_per_batch * settings.batch.group_size),
        chunk_tokens=settings.rollout.chunk_tokens,
        metrics=metrics,
        wall_s=machinery.clock.now,
        on_replay=settings.agent.on_replay,
    )
    return AgentEpisodes(
        shared=shared,
        registry=registry,
        base_url="",
        refuse_calls=endpoint.stop,
        solve=solver.solve,
        terms=AgentTerms(deadline_s=DEADLINE_S, on_deadline=settings.agent.on_deadline),
    )
