"""Opens the runner of a rollout's episodes: the environment loop, or agents."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from gspo.tasks.environments import Environment
from gspo_protocol.codec import Array
from gspo_protocol.limits import trajectory_limits
from gspo_protocol.messages import Lease
from gspo_services.rollout.agents import Solve, open_agents, open_solver
from gspo_services.rollout.environment_loop import EnvironmentLoop
from gspo_services.rollout.episodes import EpisodeShared
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.model_reward import ModelReward, ModelUse, open_model_reward
from gspo_services.rollout.rendering import Renderer, RenderingError, create_renderer
from gspo_services.rollout.reward_options import reward_pool_options
from gspo_services.rollout.sandboxes import open_sandbox
from gspo_services.rollout.sglang import GenerateRequest, OutputPiece
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeFailed, EpisodeIntake, EpisodeRunner, EpisodeWork, PolicyEngine
from gspo_services.shared.runtime.clock import Clock
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import RewardPool, create_environment


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy for episodes: where they sample, and where their tokens go."""

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


@dataclass(frozen=True)
class CountedEngine:
    """A ``PolicyEngine`` whose tokens without text are counted."""

    policy: Policy

    async def stop_generating(self) -> None:
        """See ``Engine.stop_generating``."""
        await self.policy.engine.stop_generating()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[OutputPiece, None]:
        """See ``Engine.generate``."""
        async with aclosing(self.policy.engine.generate(request)) as pieces:
            async for piece in pieces:
                self.policy.metrics.unknown_tokens.inc(self.policy.tokenizer.num_unknown(piece.token_ids))
                yield piece


@dataclass(frozen=True, kw_only=True)
class GradedEnvironment:
    """An environment, the pool for its slow rewards, and perhaps a reward model."""

    environment: Environment
    rewards: RewardPool
    model: ModelReward | None = None


@asynccontextmanager
async def open_user_code(
    settings: Settings, name: str, metrics: RolloutMetrics, *, model: ModelUse = "always"
) -> AsyncIterator[Solve | GradedEnvironment]:
    """Open the user's code that plays the episodes of rollout ``name``: an agent, or an environment with rewards.

    ``model``: which of them the reward model scores.
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
    async with (
        open_sandbox(settings.sandbox, environment) as sandboxes,
        RewardPool(
            options, environment.reward_functions, metrics.reward_took, sandboxes=sandboxes, probes=environment.reward_probes
        ) as rewards,
        open_model_reward(settings, environment, model, metrics.reward_took) as scores,
    ):
        yield GradedEnvironment(environment=environment, rewards=rewards, model=scores)


@asynccontextmanager
async def open_comparing(
    settings: Settings, player: Solve | GradedEnvironment, metrics: RolloutMetrics
) -> AsyncIterator[RewardPool | None]:
    """Open the pool that runs ``reward.group``: the environment's own, or one beside an agent. None: it is not set.

    Raises: as ``open_user_code``.
    """
    if not settings.reward.group:
        yield None
        return
    async with AsyncExitStack() as stack:
        if isinstance(player, GradedEnvironment):
            rewards = player.rewards
        else:
            own = RewardPool(reward_pool_options(settings.reward, os.environ), (), metrics.reward_took)
            rewards = await stack.enter_async_context(own)
        await rewards.require_group(settings.reward.group)
        yield rewards


def group_rewards(settings: Settings, policy: Policy, pool: RewardPool | None) -> GroupRewards | None:
    """What compares the answers of groups with the workers of ``pool``; None without a pool."""
    if pool is None:
        return None
    return GroupRewards(
        settings=settings.reward, rewards=pool, tokenizer=policy.tokenizer, broker=policy.broker, metrics=policy.metrics
    )


class EpisodesBySet:
    """The ``EpisodeRunner`` of training and of the evaluation sets: each lease says which plays it."""

    def __init__(self, training: EpisodeRunner, by_set: Mapping[str, EpisodeRunner]) -> None:
        self._training = training
        self._by_set = by_set

    def begin(self, lease: Lease, arrays: Mapping[str, Array], tasks: asyncio.TaskGroup) -> EpisodeWork:
        """See ``EpisodeRunner.begin``."""
        if not lease.evaluation_set:
            return self._training.begin(lease, arrays, tasks)
        runner = self._by_set.get(lease.evaluation_set)
        return UnknownSet(lease.evaluation_set) if runner is None else runner.begin(lease, arrays, tasks)

    async def stop_generating(self) -> None:
        """See ``EpisodeRunner.stop_generating``."""
        for runner in (self._training, *self._by_set.values()):
            await runner.stop_generating()


@dataclass(frozen=True)
class UnknownSet:
    """The ``EpisodeWork`` of a set that this rollout's configuration does not have."""

    name: str
    num_tokens = 0
    is_in_user_code = False

    async def run(self) -> None:
        """Raises: EpisodeFailed."""
        raise EpisodeFailed(
            f"this rollout has no evaluation.sets.{self.name}, but the broker has: start both with the same configuration"
        )

    async def send_rest(self) -> None:
        """Do nothing: there are no tokens."""


@asynccontextmanager
async def open_all_episodes(
    settings: Settings, name: str, policy: Policy, player: Solve | GradedEnvironment, registry: CollectorRegistry
) -> AsyncIterator[EpisodeRunner]:
    """Open the episodes of rollout ``name``: of training, which ``player`` plays, and of each evaluation set.

    Raises: as ``open_episodes`` and ``open_user_code``.
    """
    async with AsyncExitStack() as stack:
        training = await stack.enter_async_context(open_episodes(settings, policy, player, registry))
        by_set = {}
        for set_name, chosen in settings.evaluation.in_runs().items():
            of_set = settings.for_set(chosen)
            if of_set.agent.is_used:
                # The port of training is taken; agents are told which one is theirs.
                of_set = of_set.model_copy(update={"agent": of_set.agent.model_copy(update={"port": 0})})
            of_player = player
            if of_set.environment != settings.environment and isinstance(player, GradedEnvironment):
                of_player = await stack.enter_async_context(open_user_code(of_set, name, policy.metrics, model="needed"))
            # Its own registry: the metrics of agents' endpoints have one name each.
            opened = open_episodes(of_set, policy, of_player, CollectorRegistry())
            by_set[set_name] = await stack.enter_async_context(opened)
        yield EpisodesBySet(training, by_set) if by_set else training


@asynccontextmanager
async def open_episodes(
    settings: Settings, policy: Policy, player: Solve | GradedEnvironment, registry: CollectorRegistry
) -> AsyncIterator[EpisodeRunner]:
    """Open a rollout's episodes from the configuration; ``player`` is its agent or its environment.

    Raises: ConfigurationError that names the setting; EndpointError when the agents' endpoint cannot listen.
    """
    limits = trajectory_limits(settings.batch.groups_per_batch * settings.batch.group_size)
    policy = replace(policy, engine=CountedEngine(policy))
    if isinstance(player, GradedEnvironment):
        yield _environment_loop(settings, policy, player, limits.turns)
        return
    try:
        renderer = create_renderer(
            policy.tokenizer, settings.agent.renderer, most_tokens=settings.largest_sampling.max_tokens
        )
    except RenderingError as error:
        raise ConfigurationError(f"agent.renderer: {error}") from error
    shared = EpisodeShared(
        renderer=policy.watched(renderer),
        engine=policy.engine,
        broker=policy.broker,
        may_generate=policy.may_generate,
        limits=limits,
        chunk_tokens=settings.rollout.chunk_tokens,
        metrics=policy.metrics,
        wall_s=policy.wall_s,
        roles=settings.agent.roles,
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
        model=player.model,
        broker=policy.broker,
        may_generate=policy.may_generate,
        max_turns=max_turns,
        chunk_tokens=settings.rollout.chunk_tokens,
        metrics=policy.metrics,
    )
