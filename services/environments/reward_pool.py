"""Computes rewards in processes that can be killed.

Reward code hangs, leaks, crashes and sets alarms; the agent loop must not. Each worker is an interpreter of its own
with limits on memory, files and CPU time, without network where the kernel allows that, and without our environment
variables. When a job misses its deadline, its worker is killed and the job gets a failure reason; the next job finds a new
worker. Messages are msgpack over pipes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from types import TracebackType
from typing import Annotated, Any, Literal

import msgpack
import msgspec
import structlog

from gspo.environments import RewardJob
from services.reward_worker.isolation import worker_environment
from services.reward_worker.worker import LENGTH, MAX_MESSAGE_BYTES
from services.runtime.lifecycle import module_command

log = structlog.get_logger(__name__)

FailureReason = Literal["deadline", "memory", "crashed", "raised", "not_finite", "unknown_function", "too_large", "closed"]


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. A trajectory without a reward is dropped with the reason; it never gets 0."""

    reward: float | None
    """Finite; None when there is a failure."""
    failure: FailureReason | None = None
    detail: str = ""


class RewardPoolOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers there are, and what each may use."""

    num_workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2
    memory_bytes: Annotated[int, msgspec.Meta(ge=128 * 1024 * 1024)] = 2 * 1024**3
    """Address space of one worker, libraries included."""
    cpu_s: Annotated[int, msgspec.Meta(ge=1)] = 60
    """CPU seconds of one job; its deadline is a separate limit."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """The limit for a worker to start and import the job's function."""
    max_jobs_per_worker: Annotated[int, msgspec.Meta(ge=1)] = 2_000
    """A worker is replaced after this many jobs, because symbolic algebra fills caches that are never emptied."""


class RewardPool:
    """Grades as many jobs at a time as there are workers; a job waits while all are busy.

    The pool keeps no queue of its own, so a slow reward slows the agent loop down and nothing piles up here.
    Use it as an asynchronous context manager; workers start when first needed.
    """

    def __init__(self, options: RewardPoolOptions | None = None) -> None:
        self._options = RewardPoolOptions() if options is None else options
        self._workers = [_Worker(self._options) for _ in range(self._options.num_workers)]
        self._idle = list(self._workers)
        self._free = asyncio.Semaphore(self._options.num_workers)
        self._closed = False

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill every worker; jobs in progress and jobs that wait end with the failure "closed"."""
        self._closed = True
        for worker in self._workers:
            await worker.close()

    async def grade(self, job: RewardJob) -> RewardResult:
        """The reward of ``job``, or why there is none. It never raises because of the job or its worker.

        waits for:    a free worker, then at most start_timeout_s + job.deadline_s
        unblocked by: another job's end; the deadline, which kills; close
        """
        request = msgpack.packb({"function": job.function, "arguments": job.arguments})
        if len(request) > MAX_MESSAGE_BYTES:
            return _failed("too_large", f"a job of {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        async with self._free:
            if self._closed:
                return _failed("closed", "the reward pool is closed")
            # The worker that became free last, so that only as many interpreters start as the load needs.
            worker = self._idle.pop()
            try:
                result = await worker.grade(request, job.deadline_s)
            finally:
                self._idle.append(worker)
        if self._closed and result.failure == "crashed":
            return _failed("closed", "the reward pool was closed during the job")
        if result.failure is not None:
            log.warning("reward_failed", function=job.function, reason=result.failure, detail=result.detail)
        return result


class _Worker:
    """One worker process, or the place for one."""

    def __init__(self, options: RewardPoolOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._num_jobs = 0
        self._closed = False
        self._said_not_isolated = False

    async def close(self) -> None:
        """Kill the process and never start another."""
        self._closed = True
        await self.kill()

    async def grade(self, request: bytes, deadline_s: float) -> RewardResult:
        """Let the worker grade ``request``. An early end kills the process, so no pipe stays half read."""
        finished = False
        try:
            result = await self._answer(request, deadline_s)
            finished = result.failure in (None, "raised", "not_finite", "unknown_function")
            return result
        finally:
            if not finished or self._num_jobs >= self._options.max_jobs_per_worker:
                await self.kill()

    async def kill(self) -> None:
        """End the process and everything that it started; does nothing when there is none."""
        process, self._process, self._num_jobs = self._process, None, 0
        if process is None:
            return
        try:
            # The worker leads a process group of its own, so the processes that it started end with it.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("reward_worker_gone", pid=process.pid)
        await process.wait()

    async def _answer(self, request: bytes, deadline_s: float) -> RewardResult:
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                process = await self._running_process()
                stdin, stdout = process.stdin, process.stdout
                assert stdin is not None
                assert stdout is not None
                stdin.write(LENGTH.pack(len(request)) + request)
                await stdin.drain()
                answer = await _read_answer(stdout)
        except TimeoutError:
            return _failed("deadline", f"the worker was not ready within {self._options.start_timeout_s} s")
        except (ConnectionError, asyncio.IncompleteReadError):
            return _failed("crashed", "the worker ended before the job began")
        if "failure" in answer:
            return _failed(answer["failure"], answer["detail"])
        try:
            async with asyncio.timeout(deadline_s):
                answer = await _read_answer(stdout)
        except TimeoutError:
            return _failed("deadline", f"not done after {deadline_s} s")
        except (ConnectionError, asyncio.IncompleteReadError):
            return _failed("crashed", "the worker ended during the job: a limit on CPU time or memory, or a crash")
        self._num_jobs += 1
        if "failure" in answer:
            return _failed(answer["failure"], answer["detail"])
        return RewardResult(reward=answer["reward"])

    async def _running_process(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *module_command("services.reward_worker", str(self._options.memory_bytes), str(self._options.cpu_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=worker_environment(os.environ),
                start_new_session=True,
            )
            assert self._process.stdout is not None
            await self._read_isolation(self._process.stdout)
        if self._closed:
            raise ConnectionAbortedError("closed while the worker was starting")
        return self._process

    async def _read_isolation(self, stdout: asyncio.StreamReader) -> None:
        reason = (await _read_answer(stdout))["not_isolated"]
        if reason and not self._said_not_isolated:
            self._said_not_isolated = True
            log.warning(
                "reward_worker_not_isolated",
                reason=reason,
                meaning="reward code can reach the network; limits on memory, files and time hold",
            )


async def _read_answer(stream: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    answer: dict[str, Any] = msgpack.unpackb(await stream.readexactly(length))
    return answer


def _failed(reason: FailureReason, detail: str) -> RewardResult:
    return RewardResult(reward=None, failure=reason, detail=detail)
