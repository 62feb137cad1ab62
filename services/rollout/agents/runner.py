"""One agent's episode: its calls come in at the endpoint, its reward is what its code returns."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NoReturn, Protocol

from gspo_protocol.codec import Array
from gspo_protocol.messages import Lease
from gspo_services.rollout.episodes import EpisodeCalls, EpisodeRegistry, EpisodeShared, WrongTurns
from gspo_services.rollout.sglang import EngineError
from gspo_services.rollout.work import EpisodeFailed, EpisodeSpared
from gspo_services.shared.runtime.errors import ServiceError
from gspo_services.tasks.agents import AgentFailure, AgentResult, AgentTask, StepJournal
from gspo_services.tasks.environments import through_the_door

SPARED: Final = 2
"""How often one episode may end with a worker that others shared before it gets a worker to itself: often enough that an
honest one rarely needs to, seldom enough that one which ends its worker each time takes few others with it."""
REMEMBERED: Final = 4096


class Solve(Protocol):
    """Runs the user's agent; ``is_alone``: beside no other episode in its process. A cancellation ends the agent."""

    def __call__(self, task: AgentTask, journal: StepJournal, *, is_alone: bool) -> Awaitable[AgentResult]: ...


@dataclass(frozen=True, kw_only=True)
class AgentTerms:
    """Terms that apply to every episode."""

    deadline_s: float
    on_deadline: Literal["fail", "zero"]


class AgentEpisodes:
    """The ``EpisodeRunner`` of agents."""

    def __init__(
        self,
        *,
        shared: EpisodeShared,
        registry: EpisodeRegistry,
        base_url: str,
        refuse_calls: Callable[[], Awaitable[None]],
        solve: Solve,
        terms: AgentTerms,
    ) -> None:
        """``base_url``: where agents find the policy. ``refuse_calls`` ends their calls there, and refuses new ones."""
        self._shared = shared
        self._registry = registry
        self._base_url = base_url
        self._refuse_calls = refuse_calls
        self._solve = solve
        self._terms = terms
        self._is_stopping = False
        self._ended_in_company: OrderedDict[int, int] = OrderedDict()
        """By trajectory, the newest last."""

    def begin(self, lease: Lease, arrays: Mapping[str, Array], tasks: asyncio.TaskGroup) -> "AgentEpisode":
        """See ``EpisodeRunner.begin``. Raises: EpisodeFailed when the lease's journal does not belong to its tokens."""
        return AgentEpisode(self, lease, EpisodeCalls(lease, arrays, self._shared, tasks))

    async def stop_generating(self) -> None:
        """See ``EpisodeRunner.stop_generating``."""
        self._is_stopping = True
        # Close the endpoint first: an agent whose call is ended asks again at once.
        await self._refuse_calls()
        await self._shared.engine.stop_generating()

    async def run(self, lease: Lease, calls: EpisodeCalls) -> None:
        """See ``EpisodeWork.run``."""
        await through_the_door(self._run(lease, calls), self._refused, (EpisodeFailed, EngineError))

    async def _run(self, lease: Lease, calls: EpisodeCalls) -> None:
        if self._shared.on_replay == "fail" and (lease.num_tokens or lease.num_entries):
            raise EpisodeFailed('the episode was cut off, and agent.on_replay is "fail"')
        key = self._registry.add(calls)
        try:
            task = AgentTask(
                task=lease.task,
                seed=lease.seed,
                base_url=self._base_url,
                api_key=key,
                model=self._registry.model,
                roles=list(self._registry.roles),
                deadline_s=self._terms.deadline_s,
            )
            is_alone = self._ended_in_company.get(lease.trajectory_id, 0) >= SPARED
            result = await calls.while_whole(self._solve(task, calls.steps, is_alone=is_alone))
            if result.in_company:
                self._spare(lease.trajectory_id, result)
            await self._finish(calls, result)
        finally:
            self._registry.remove(key)
            try:
                if self._is_stopping:
                    # An agent whose call is refused fails before the engine has been told to end, and what that has made
                    # would be sampled again. Whoever stops us waits for so long, and no longer.
                    await calls.until_sampled()
            finally:
                await calls.close()

    def _spare(self, trajectory_id: int, result: AgentResult) -> NoReturn:
        """Raises: EpisodeSpared. Nobody knows who ended the worker: whoever ends one that is its own has shown it."""
        self._count(result.failure)
        self._ended_in_company[trajectory_id] = self._ended_in_company.pop(trajectory_id, 0) + 1
        if len(self._ended_in_company) > REMEMBERED:
            self._ended_in_company.popitem(last=False)
        raise EpisodeSpared(f"agent: {result.failure}, in a worker that others shared: {result.detail}")

    async def _finish(self, calls: EpisodeCalls, result: AgentResult) -> None:
        if result.reward is not None:
            try:
                await calls.finish(result.reward, components=result.components, turns=result.turns)
            except WrongTurns as error:
                self._refused("wrong_turns", str(error))
            return
        if result.failure in ("unknown_function", "no_worker"):
            self._count(result.failure)
            # The fault affects every episode: trying them all would only drop every group. But a worker had started before,
            # so it may pass: the next start finds out.
            raise ServiceError(f"agent.function: {result.detail}")
        if result.failure == "deadline" and self._terms.on_deadline == "zero":
            self._count(result.failure)
            await calls.finish(0.0, "length")
            return
        self._refused(result.failure, result.detail)

    def _refused(self, reason: AgentFailure | None, detail: str) -> NoReturn:
        self._count(reason)
        raise EpisodeFailed(f"agent: {reason}: {detail}")

    def _count(self, reason: AgentFailure | None) -> None:
        self._shared.metrics.agent_failures.labels(failure=reason).inc()


class AgentEpisode:
    """One episode; see ``EpisodeWork``."""

    def __init__(self, episodes: AgentEpisodes, lease: Lease, calls: EpisodeCalls) -> None:
        self._episodes = episodes
        self._lease = lease
        self._calls = calls

    @property
    def num_tokens(self) -> int:
        return self._calls.log.num_tokens

    @property
    def is_in_user_code(self) -> bool:
        return not self._calls.is_sampling

    async def run(self) -> None:
        """See ``EpisodeWork.run``."""
        await self._episodes.run(self._lease, self._calls)

    async def send_rest(self) -> None:
        """See ``EpisodeWork.send_rest``."""
        await self._calls.hand_back()
