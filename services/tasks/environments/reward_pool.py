"""Computes rewards in processes that can be killed, and asks services for them.

Reward code hangs, leaks, crashes and sets alarms; the agent loop must not. Each worker is an interpreter of its own
with limits on memory, files and CPU time, without network where the kernel allows that, and without our environment
variables. When a job misses its deadline, its worker is killed and the job gets a failure reason; the next job finds a new
worker. Messages are msgpack over a socket.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgpack
import structlog

from gspo.tasks.environments import RewardJob
from gspo_services.shared.runtime.errors import ConfigurationError, ServiceError, UnprovenError
from gspo_services.tasks.environments.layouts import KeptRows
from gspo_services.tasks.environments.programs import SandboxedJobs
from gspo_services.tasks.environments.reward_process import RewardProcess
from gspo_services.tasks.environments.reward_results import (
    FailureReason,
    RewardPart,
    RewardPoolOptions,
    RewardResult,
    no_reward,
)
from gspo_services.tasks.environments.scoring import score_of, through_the_door
from gspo_services.tasks.sandbox import Sandboxes
from gspo_services.tasks.worker.failures import kind_of
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from gspo_services.tasks.environments.reward_service import RewardService

log = structlog.get_logger(__name__)

__all__ = ["FailureReason", "RewardPool", "RewardPoolOptions", "RewardResult"]


class RewardPool:
    """Grades as many jobs at a time as there are workers; a job waits while all are busy.

    The pool keeps no queue of its own, so a slow reward slows the agent loop down and nothing piles up here.
    Use it as an asynchronous context manager; workers start when first needed.
    """

    def __init__(
        self,
        options: RewardPoolOptions | None = None,
        functions: Sequence[str | RewardJob] = (),
        took: Callable[[RewardPart, float], None] = lambda part, seconds: None,
        *,
        sandboxes: Sandboxes | None = None,
        probes: Sequence[RewardJob] = (),
    ) -> None:
        """``functions``: those that must be there before the pool opens (``TaskSet.reward_functions``). ``took`` hears how
        many seconds each part of each reward took. ``sandbox`` is for jobs with a grader; ``probes`` must be worth 1 before
        the pool opens."""
        self._options = RewardPoolOptions() if options is None else options
        self._functions = functions
        self._took = took
        self._workers = [RewardProcess(self._options) for _ in range(self._options.num_workers)]
        self._idle = list(self._workers)
        self._free = asyncio.Semaphore(self._options.num_workers)
        self._service: RewardService | None = None
        self._sandboxed = SandboxedJobs(sandboxes, KeptRows().tests)
        self._probes = probes
        self._closed = False

    async def __aenter__(self) -> RewardPool:
        """Raises: ConfigurationError when one of the functions cannot be imported in a worker, or a probe is not worth 1;
        ServiceError when an import takes longer than start_timeout_s, or a signal ends the worker."""
        try:
            for function in self._functions:
                await self._require(function)
            for probe in self._probes:
                await self._sandboxed.require(probe)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def require_group(self, function: str) -> None:
        """Raises: as ``__aenter__``, for a function that compares the answers of a group."""
        await self._require(function, 0)

    async def close(self) -> None:
        """Kill every worker; jobs in progress and jobs that wait end with the failure "closed"."""
        self._closed = True
        if self._service is not None:
            await self._service.close()
        for worker in self._workers:
            await worker.close()

    async def grade(self, job: RewardJob, group_size: int | None = None) -> RewardResult:
        """The reward of ``job``, or why there is none. It never raises because of the job or its worker.

        ``group_size``: its function compares so many answers, and the result has a reward for each; None: one answer.

        waits for:    a free worker, then at most start_timeout_s + job.deadline_s; a service, at most job.deadline_s; the
                      sandbox
        unblocked by: another job's end; the deadline, which kills; a program's limits; close
        """
        result = await through_the_door(self._result(job, group_size), no_reward)
        if self._closed and result.failure in ("crashed", "unreachable", "sandbox"):
            return no_reward("closed", "the reward pool was closed during the job")
        if result.failure is not None:
            log.warning(
                "reward_failed",
                by=_who_graded(job),
                reason=result.failure,
                reward=result.reward,
                detail=result.detail,
            )
        return result

    async def _result(self, job: RewardJob, group_size: int | None) -> RewardResult:
        if job.url:
            return await self._by_service(job)
        return await (self._by_grader(job) if job.grader else self._by_worker(job, group_size))

    async def _by_service(self, job: RewardJob) -> RewardResult:
        if self._closed:
            return no_reward("closed", "the reward pool is closed")
        if self._service is None:
            # Not before: the broker imports this package, too, and its image has no HTTP client.
            from gspo_services.tasks.environments.reward_service import RewardService

            self._service = RewardService()
        with self._timed("work"):
            return await self._service.grade(job)

    async def _by_grader(self, job: RewardJob) -> RewardResult:
        with self._timed("work"):
            return await self._sandboxed.result(job)

    async def _by_worker(self, job: RewardJob, group_size: int | None) -> RewardResult:
        with self._timed("wait"):
            await self._free.acquire()
        try:
            if self._closed:
                return no_reward("closed", "the reward pool is closed")
            with self._timed("work"):
                async with self._scratch() as folder:
                    return await self._graded(job, folder, group_size)
        finally:
            self._free.release()

    @contextmanager
    def _timed(self, part: RewardPart) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        begin = clock()
        yield
        self._took(part, clock() - begin)

    async def _require(self, job: str | RewardJob, group_size: int | None = None) -> None:
        worker = self._idle[-1]  # the one that the first job gets
        wanted = _request(job, group_size)
        answer = await worker.grade(msgpack.packb({**wanted, "only_find": True}), None)
        if answer.failure is not None:
            # A slow start may have been this machine's doing, and go well the next time.
            error: type[Exception] = UnprovenError if answer.failure == "crashed" else ConfigurationError
            if answer.failure == "deadline" or worker.was_killed:
                error = ServiceError
            needs = (
                "\nIt needs its package installed, or its module beside the configuration; it is imported with the limits of"
            )
            advice = "" if answer.failure == "bad_job" else f"{needs} [reward]"
            raise error(f'the reward function "{wanted["function"]}" cannot be used: {answer.detail}{advice}')

    async def _graded(self, job: RewardJob, folder: str, group_size: int | None) -> RewardResult:
        try:
            request = msgpack.packb({**_request(job, group_size), "only_find": False, "scratch": folder})
        except (TypeError, ValueError, OverflowError) as error:
            return no_reward("bad_job", f"the job's arguments are not plain data: {error}")
        if len(request) > MAX_MESSAGE_BYTES:
            return no_reward("too_large", f"a job of {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        # The worker that became free last, so that only as many interpreters start as the load needs.
        worker = self._idle.pop()
        try:
            answer = await worker.grade(request, job.deadline_s, group_size)
        finally:
            self._idle.append(worker)
        # Only of a job that had begun: a worker that starts too slowly is not the policy's doing.
        is_slow = answer.failure in ("deadline", "cpu_time") and answer.found
        if is_slow and group_size is None and self._options.on_deadline == "zero":
            return RewardResult(reward=0.0, failure=answer.failure, detail=answer.detail)
        if answer.failure is not None:
            return no_reward(answer.failure, answer.detail)
        if group_size is not None:
            return RewardResult(reward=None, of_answers=[_scored(each, job) for each in answer.rewards or []])
        return _scored(answer.value, job)

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[str]:
        """The path of a job's own folder; "" when jobs write no files."""
        if not self._options.scratch:
            yield ""
            return
        folder = tempfile.mkdtemp(prefix="gspo-reward-")
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _request(job: str | RewardJob, group_size: int | None) -> dict[str, Any]:
    """What a worker is told of a job. A name stands for jobs whose arguments are not known yet."""
    if isinstance(job, str):
        return {"function": job, "form": "", "arguments": None, "size": group_size}
    return {"function": job.function, "form": job.form, "arguments": job.arguments, "size": group_size}


def _who_graded(job: RewardJob) -> str:
    try:
        return f"{job.function or job.url or job.grader}"
    # Nobody has checked the fields: a job is made by the user's code.
    except BaseException:  # noqa: BLE001
        return kind_of(job)


def _scored(value: float | dict[str, float] | None, job: RewardJob) -> RewardResult:
    """Raises: UnscoredError."""
    score = score_of(value, job.counted)
    return RewardResult(reward=score.reward, components=score.components)
