"""Runs agents that are Python functions: each episode in a worker process that can be killed, many in each."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, get_args

import msgspec
import structlog

from gspo_services.tasks.agents.conversation import EpisodeConversation
from gspo_services.tasks.agents.journal import NoJournal, StepJournal
from gspo_services.tasks.agents.messages import MAX_START_BYTES, WorkerDone, start_message
from gspo_services.tasks.agents.options import AgentPoolOptions
from gspo_services.tasks.agents.output import UserOutput
from gspo_services.tasks.agents.results import AgentFailure, AgentResult, AgentTask, failed, scored
from gspo_services.tasks.agents.worker import UserWorker, WorkerEpisode
from gspo_services.tasks.computers import ComputerOptions, EpisodeComputer, answer_in
from gspo_services.tasks.worker.reward_value import UnscoredReason

log = structlog.get_logger(__name__)

_WORKERS_REASONS: tuple[AgentFailure, ...] = ("deadline", "raised", "memory", *get_args(UnscoredReason))
"""Failures that a worker may report."""

MAX_STARTS: Final = 3
"""Workers that may end at their start before an episode has none."""


class WorkerNotReady(msgspec.Struct, frozen=True):
    """Why a worker cannot run the agent."""

    detail: str
    is_proven: bool
    """Two workers said the same, and nothing has killed them: another try would end alike."""


class AgentPool:
    """Solves as many episodes at a time as its workers have places; an episode waits while all are taken.

    ``tasks`` owns the workers' life cycles and must outlive the pool. Workers start when they are first needed.
    """

    def __init__(
        self,
        function: str,
        options: AgentPoolOptions | None = None,
        *,
        tasks: asyncio.TaskGroup,
        output: UserOutput | None = None,
        computers: ComputerOptions | None = None,
    ) -> None:
        """``function``: the agent, "package.module:function". ``computers``: None for episodes without one."""
        self._function = function
        self._options = AgentPoolOptions() if options is None else options
        self._tasks = tasks
        self._computers = computers
        self._output = UserOutput() if output is None else output
        self._workers: list[UserWorker] = []
        self._places = asyncio.Semaphore(self._options.num_workers * self._options.episodes_per_worker)
        self._places_alone = asyncio.Semaphore(self._options.num_workers)
        self._closed = False

    async def __aenter__(self) -> AgentPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every worker; episodes in them and episodes that wait end with the failure "closed"."""
        self._closed = True
        workers = list(self._workers)
        for worker in workers:
            worker.end("closed", "the agents' workers were closed")
        for worker in workers:
            await worker.ended.wait()

    async def first_worker(self) -> WorkerNotReady | None:
        """Start a worker before it is needed, and another one if the first ends. Returns why none runs the agent, or None.

        waits for:    the import of the agent, at most twice start_timeout_s
        """
        first = await self._tried_worker()
        if first is None:
            return None
        log.warning("user_worker_started_again", function=self._function, detail=first.detail)
        second = await self._tried_worker()
        if second is None:
            return None
        return WorkerNotReady(second.detail, is_proven=second == first and second.is_proven)

    async def _tried_worker(self) -> WorkerNotReady | None:
        worker = self._start_worker()
        await worker.ready.wait()
        if worker.end_result is None:
            return None
        await worker.ended.wait()
        return WorkerNotReady(worker.end_result.detail, is_proven=not worker.was_killed)

    async def solve(self, task: AgentTask, journal: StepJournal | None = None, *, is_alone: bool = False) -> AgentResult:
        """The result of one episode, whatever its code does. A cancelled call cancels the episode in its worker.

        ``is_alone``: in a worker of its own, beyond the others, at most as many at a time as there are others.
        waits for:    a free place, then at most MAX_STARTS * start_timeout_s + deadline_s + grace_s, and ``journal``
        unblocked by: the end of another episode; the deadline, which kills in the end; close
        Raises: what ``journal`` raises; the episode is then given up.
        """
        journal = NoJournal() if journal is None else journal
        recorded = [(step.name, step.arguments, answer_in(step.name, step.result)) for step in journal.recorded]
        fields, has_computer = msgspec.structs.asdict(task), self._computers is not None
        if len(start_message(0, fields, recorded, has_computer)) > MAX_START_BYTES:
            return failed("too_large", f"task and recorded steps do not fit a message of {MAX_START_BYTES} bytes")
        entered = await self._entered(is_alone)
        if isinstance(entered, AgentResult):
            result = entered
        else:
            worker, episode = entered
            try:
                worker.send(start_message(episode.number, fields, recorded, has_computer))
                result = await self._follow(worker, episode, task, journal)
            finally:
                worker.leave(episode)
        if result.failure is not None:
            log.warning("agent_failed", function=self._function, reason=result.failure, detail=result.detail)
        return result

    async def _entered(self, is_alone: bool) -> tuple[UserWorker, WorkerEpisode] | AgentResult:
        """Enter a worker that is ready. Returns why there is none after MAX_STARTS: that is no episode's fault."""
        places = self._places_alone if is_alone else self._places
        result = None
        for _ in range(MAX_STARTS):
            await places.acquire()
            if self._closed:
                places.release()
                return failed("closed", "the agents' workers are closed")
            worker = self._start_worker(is_alone=True) if is_alone else self._next_worker()
            episode = worker.enter()  # from here on the worker frees the place
            try:
                await worker.ready.wait()
            except asyncio.CancelledError:
                worker.leave(episode)
                raise
            result = worker.end_result
            if worker.has_started or result is None:
                return worker, episode
            if result.failure == "closed":
                break
        assert result is not None
        if result.failure in ("closed", "unknown_function"):
            return result
        text = f"{MAX_STARTS} workers ended before they could begin an episode, the last: {result.detail}"
        return failed("no_worker", text)

    async def _follow(
        self, worker: UserWorker, episode: WorkerEpisode, task: AgentTask, journal: StepJournal
    ) -> AgentResult:
        """Serve the episode's steps until it ends."""
        computer = None
        if self._computers is not None:
            computer = EpisodeComputer(self._computers, [(step.name, step.result) for step in journal.recorded])
        conversation = EpisodeConversation(worker, episode, journal, computer)
        try:
            # The worker keeps the deadline itself, and says where its code was. This is for one that does not.
            async with asyncio.timeout(task.deadline_s + self._options.grace_s) as limit:
                done = await conversation.until_done()
        except TimeoutError:
            if not limit.expired():
                raise
            if not episode.is_done:
                worker.end("deadline", f"it did not end {self._options.grace_s} s after its deadline", episode.number)
            return failed("deadline", f"not done {self._options.grace_s} s after its deadline of {task.deadline_s} s")
        if isinstance(done, AgentResult):
            return done
        return self._judged(done)

    def _judged(self, done: WorkerDone) -> AgentResult:
        if done.failure is not None:
            # An agent that lets a cancellation out which nobody asked for has failed like one that raises.
            reason: AgentFailure = next((known for known in _WORKERS_REASONS if known == done.failure), "raised")
            return failed(reason, done.detail)
        value = done.reward if done.components is None else done.components
        if value is None:
            return failed("no_result", "the worker reports neither a reward nor a failure")
        return scored(value, self._options.weights, done.turns)

    def _next_worker(self) -> UserWorker:
        """The worker with the fewest episodes; a new one only when each has some and there may be more."""
        self._workers = [worker for worker in self._workers if not worker.ended.is_set()]
        usable = [
            worker for worker in self._workers if worker.takes_more and worker.load < self._options.episodes_per_worker
        ]
        least = min(usable, key=lambda worker: worker.load, default=None)
        num_taking = sum(worker.takes_more for worker in self._workers)
        if least is None or (least.load and num_taking < self._options.num_workers):
            least = self._start_worker()
        return least

    def _start_worker(self, *, is_alone: bool = False) -> UserWorker:
        places = self._places_alone if is_alone else self._places
        worker = UserWorker(self._function, self._options, self._output, places.release, takes_one=is_alone)
        self._workers.append(worker)
        life = self._tasks.create_task(worker.run(), name="user-worker")
        # A task that is cancelled before its first step runs nothing at all, and ``close`` would wait for ever.
        life.add_done_callback(lambda _: worker.conclude())
        return worker
