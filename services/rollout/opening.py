"""Opens whatever runs the episodes of a rollout: the environment's loop, or agents."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from protocol.limits import trajectory_limits
from services.environments import RewardPool, RewardPoolOptions, create_environment
from services.rollout.agents import Solve, open_agents
from services.rollout.environment_loop import EnvironmentLoop
from services.rollout.episodes import EpisodeShared
from services.rollout.metrics import RolloutMetrics
from services.rollout.rendering import RenderingError, create_renderer
from services.rollout.sglang import Engine
from services.rollout.tokenizer import ChatTokenizer
from services.rollout.work import EpisodeRunner
from services.runtime.clock import Clock
from services.runtime.errors import ConfigurationError
from services.runtime.net import PeerClient
from services.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy as episodes sample from it, and where their tokens go."""

    tokenizer: ChatTokenizer
    engine: Engine
    broker: PeerClient
    may_generate: asyncio.Event
    """Cleared while the engine's weights are replaced: a new request waits, a request under way continues afterwards."""
    metrics: RolloutMetrics
    clock: Clock
    wall_s: Callable[[], float]
    """Seconds since 1970."""


@asynccontextmanager
async def open_episodes(
    settings: Settings, policy: Policy, solve: Solve | None, registry: CollectorRegistry
) -> AsyncIterator[EpisodeRunner]:
    """The episodes of a rollout, as the configuration says; ``solve`` runs its agent, where it has one.

    Raises: ConfigurationError that names the setting; EndpointError when the agents' endpoint cannot listen.
    """
    limits = trajectory_limits(settings.batch.groups_per_batch * settings.batch.group_size)
    if solve is None:
        async with _environment_loop(settings, policy, limits.turns) as loop:
            yield loop
        return
    try:
        renderer = create_renderer(policy.tokenizer, settings.agent.renderer, settings.agent.template_arguments)
    except RenderingError as error:
        raise ConfigurationError(f"agent.renderer or agent.template_arguments: {error}") from error
    shared = EpisodeShared(
        renderer=renderer,
        engine=policy.engine,
        broker=policy.broker,
        may_generate=policy.may_generate,
        sampling=settings.sampling,
        limits=limits,
        chunk_tokens=settings.rollout.chunk_tokens,
        metrics=policy.metrics,
        wall_s=policy.wall_s,
        on_replay=settings.agent.on_replay,
    )
    async with open_agents(settings, shared, solve, registry=registry, clock=policy.clock) as agents:
        yield agents


@asynccontextmanager
async def _environment_loop(settings: Settings, policy: Policy, max_turns: int) -> AsyncIterator[EnvironmentLoop]:
    try:
        environment = create_environment(settings.environment.name, settings.environment.options)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    async with RewardPool(RewardPoolOptions(num_workers=settings.rollout.reward_workers)) as rewards:
        yield EnvironmentLoop(
            environment=environment,
            tokenizer=policy.tokenizer,
            engine=policy.engine,
            rewards=rewards,
            broker=policy.broker,
            may_generate=policy.may_generate,
            sampling=settings.sampling,
            max_turns=max_turns,
            chunk_tokens=settings.rollout.chunk_tokens,
            metrics=policy.metrics,
        )
