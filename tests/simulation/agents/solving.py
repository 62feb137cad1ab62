"""Runs agents in place of worker processes, and tells the audit what each asks, gets, does and earns."""

import asyncio
from typing import Any

from gspo.tasks.agents import Episode, arguments_digest
from gspo.tasks.environments import RewardJob
from gspo_services.rollout.endpoint import CallRefused, CallRequest
from gspo_services.rollout.episodes import EpisodeCalls, EpisodeRegistry
from gspo_services.tasks.agents import AgentResult, AgentTask, RecordedStep, StepJournal
from tests.simulation.agents.agent import Messages, Outside, play
from tests.simulation.agents.chat import conversation_of
from tests.simulation.agents.endpoint import SimEndpoint
from tests.simulation.audit.audit import Audit
from tests.simulation.audit.runs import AgentRun
from tests.simulation.engine import SimRewards
from tests.simulation.loop import Process


class SimSolver:
    """The agents of one rollout."""

    def __init__(
        self,
        process: Process,
        registry: EpisodeRegistry,
        endpoint: SimEndpoint,
        rewards: SimRewards,
        audit: Audit,
    ) -> None:
        self._process = process
        self._registry = registry
        self._endpoint = endpoint
        self._rewards = rewards
        self._audit = audit

    async def solve(self, task: AgentTask, journal: StepJournal, *, is_alone: bool) -> AgentResult:
        """See ``Solve``."""
        calls = self._registry.calls_of(task.api_key)
        assert isinstance(calls, EpisodeCalls)
        run = self._audit.agent_begins(self._process.session, calls.log.trajectory_id, calls.log.epoch)
        solving = _Solving(task, journal, self._endpoint, run, self._audit)
        reads_clock = self._audit.rules.reads_clock
        outside = Outside(ask=solving.ask, step=solving.step, now=self._audit.now, reads_clock=reads_clock)
        number = task.task["number"]
        assert isinstance(number, int)
        try:
            async with asyncio.timeout(task.deadline_s):
                total = await play(number, task.seed, outside)
        except TimeoutError:
            return AgentResult(reward=None, failure="deadline", detail="simulated")
        except CallRefused as error:
            return AgentResult(reward=None, failure="raised", detail=str(error))
        # The function of the reward is the agent's, too.
        graded = await self._rewards.grade(RewardJob(function="tests.simulation:reward", arguments={"sum": total % 9973}))
        if graded.reward is None:
            return AgentResult(reward=None, failure="raised", detail=graded.detail)
        run.earned = (graded.reward, graded.components)
        return AgentResult(reward=graded.reward, components=graded.components)


class _Solving:
    """One run of an agent. It is its episode's ``EpisodeRecord``, too."""

    def __init__(self, task: AgentTask, journal: StepJournal, endpoint: SimEndpoint, run: AgentRun, audit: Audit) -> None:
        self._key = task.api_key
        self._journal = journal
        self._endpoint = endpoint
        self._run = run
        self._audit = audit
        self._diverged: tuple[int, str, str] | None = None
        self._episode = Episode(
            task=task.task,
            seed=task.seed,
            base_url=task.base_url,
            api_key=task.api_key,
            model=task.model,
            ends_at=0.0,
            recorded=[(step.name, step.arguments, step.result) for step in journal.recorded],
            record=self,
        )

    async def ask(self, messages: Messages, *, goes_on: bool = False, stop: tuple[str, ...] = ()) -> str:
        await self._endpoint.delay()
        request = CallRequest(messages=messages, stop=stop)
        question = conversation_of(messages)
        self._run.asks(question)
        answer = await self._endpoint.ask(self._key, request)
        self._audit.answered(self._run, question, answer.token_ids, goes_on=goes_on)
        return answer.content or ""

    async def step(self, name: str, argument: int) -> int:
        result: int = await self._episode.step(name, self._effect, name, argument)
        self._audit.step_returned(self._run, name, arguments_digest((name, argument)), result)
        return result

    async def _effect(self, name: str, argument: int) -> int:
        await self._endpoint.delay()
        number = self._audit.does_step(self._run, name, arguments_digest((name, argument)))
        await self._endpoint.delay()
        return number

    # --- EpisodeRecord --------------------------------------------------------------------------------------------------

    async def record(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        if self._diverged is not None:
            diverged, self._diverged = self._diverged, None
            await self._journal.diverged(*diverged)
        await self._journal.record(RecordedStep(name, arguments, result), ordinal)

    def record_now(self, name: str, arguments: str, ordinal: int, result: Any) -> None:
        raise NotImplementedError

    def diverged(self, ordinal: int, recorded: str, name: str) -> None:
        self._diverged = ordinal, recorded, name
