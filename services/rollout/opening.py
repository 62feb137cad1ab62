"""Opens whatever runs the episodes of a rollout: the environment's loop, or agents."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from gspo.environments import Environment
from protocol.limits import trajectory_limits
from services.environments import RewardPool, create_environment
from services.rollout.agents import Solve, open_agents, open_solver
from services.rollout.environment_loop import EnvironmentLoop
from services.rollout.episodes import EpisodeShared
from services.rollout.metrics import RolloutMetrics
from services.rollout.rendering import Renderer, RenderingError, create_renderer
from services.rollout.reward_options import reward_pool_options
from services.rollout.tokenizer import ChatTokenizer
from services.rollout.work import EpisodeIntake, EpisodeRunner, PolicyEngine
from services.runtime.clock import Clock
from services.runtime.errors import ConfigurationError
from services.runtime.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy as episodes sample from it, and where their tokens go."""

    tokenizer: ChatTokenizer
    engine: PolicyEngine
    broker: EpisodeIntake
    may_generate: asyncio.Event
    """Cleared while the engine's weights are replaced: a new request waits, a request under way continues afterwards."""
    metrics: RolloutMetrics
    clock: Clock
    wall_s: Callable[[], float]
    """Seconds since 1970."""
    watched: Callable[[Renderer], Renderer] = lambda renderer: renderer
    """What agents' conversations are rendered with in place of the renderer, for whoever watches them."""


@dataclass(frozen=True, kw_only=True)
class GradedEnvironment:
    """An environment, and what computes its slow rewards."""

    environment: Environment
    rewards: RewardPool


@asynccontextmanager
async def open_user_code(settings: Settings, name: str, metrics: RolloutMetrics) -> AsyncIterator[Solve | GradedEnvironment]:
    """The user's code that plays the episodes of the rollout called ``name``: an agent, or an environment with its rewards.

    Raises: ConfigurationError that names the setting, or the function that cannot be imported; ServiceError.
    """
    if settings.agent.is_used:
        async with open_solver(settings, name) as solve:
            yield solve
        return
    try:
        environment = create_environment(settings.environment.name, settings.environment.options)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    options = reward_pool_options(settings.reward, os.environ)
    async with RewardPool(options, environment.reward_functions, metrics.reward_took) as rewards:
        yield GradedEnvironment(environment=environment, rewards=rewards)


@asynccontextmanager
async def open_episodes(
    settings: Settings, policy: Policy, player: Solve | GradedEnvironment, registry: CollectorRegistry
) -> AsyncIterator[EpisodeRunner]:
    """The episodes of a rollout, as the configuration says; ``player`` is its agent, or its environment.

    Raises: ConfigurationError that names the setting; EndpointError when the agents' endpoint cannot listen.
    """
    limits = trajectory_limits(settings.batch.groups_per_batch * settings.batch.group_size)
    if isinstance(player, GradedEnvironment):
        yield _environment_loop(settings, policy, player, limits.turns)
        return
    try:
        renderer = create_renderer(policy.tokenizer, settings.agent.renderer, settings.agent.template_arguments)
    except RenderingError as error:
        raise ConfigurationError(f"agent.renderer or agent.template_arguments: {error}") from error
    shared = EpisodeShared(
        renderer=policy.watched(renderer),
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
    async with open_agents(settings, shared, player, registry=registry, clock=policy.clock) as agents:
        yield agents


def _environment_loop(settings: Settings, policy: Policy, player: GradedEnvironment, max_turns: int) -> EnvironmentLoop:
    return EnvironmentLoop(
        environment=player.environment,
        tokenizer=policy.tokenizer,
        engine=policy.engine,
        rewards=player.rewards,
        broker=policy.broker,
        may_generate=policy.may_generate,
        sampling=settings.sampling,
        max_turns=max_turns,
        chunk_tokens=settings.rollout.chunk_tokens,
        metrics=policy.metrics,
    )
