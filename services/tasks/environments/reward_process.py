"""One reward worker from the parent's side: a process that is killed when a job in it does not end as it should."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import tempfile
from typing import Any, Final, get_args

import msgpack
import msgspec
import structlog

from gspo_protocol.messages.work import Components
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.runtime.stray_processes import MARK, ended_as, kill_marked, new_mark
from gspo_services.tasks.environments.reward_results import FailureReason, RewardPoolOptions
from gspo_services.tasks.reward_worker.isolation import MAX_FILE_BYTES, worker_environment
from gspo_services.tasks.reward_worker.worker import LENGTH, MAX_MESSAGE_BYTES
from gspo_services.tasks.worker.reward_value import UnscoredReason

log = structlog.get_logger(__name__)

_LAST_MOMENT_S: Final = 1.0
_ENDED_AS_IT_SHOULD: Final = (None, "raised", "unknown_function", "no_reward", "wrong_length", *get_args(UnscoredReason))
"""Failures of a job after which its worker takes the next one."""


class RewardAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker says; the code of the reward may also write into its pipe."""

    not_isolated: str | None = None
    found: bool | None = None
    reward: float | None = None
    components: Components | None = None
    rewards: list[float | Components] | None = None
    """Of each answer of a group."""
    failure: FailureReason | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        """Raises: ValueError for a number that no worker sends. Unlike JSON, msgpack has NaN and infinities."""
        for value in (self.reward or 0.0, self.components or {}, *(self.rewards or [])):
            for number in value.values() if isinstance(value, dict) else (value,):
                if not math.isfinite(number):
                    raise ValueError(f"a reward is {number}")

    @property
    def value(self) -> float | dict[str, float] | None:
        """What the job's function returned."""
        return self.reward if self.components is None else self.components


class RewardProcess:
    """One worker process, or the place for one."""

    def __init__(self, options: RewardPoolOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._mark = ""
        self._folder = ""
        self._num_jobs = 0
        self._closed = False
        self._said_not_isolated = False
        self.was_killed = False
        """Whether a signal that was not ours has ended the last process before its job began."""

    async def close(self) -> None:
        """Kill the process and never start another."""
        self._closed = True
        await self.kill()

    async def grade(self, request: bytes, deadline_s: float | None, group_size: int | None = None) -> RewardAnswer:
        """Let the worker grade ``request``. An early end kills the process, so no pipe stays half read.

        Without a deadline the request is only to find its function, and so is the answer. ``group_size``: the rewards that
        the answer must have; None: one.
        """
        finished = False
        try:
            answer = await self._answer(request, deadline_s, group_size)
            finished = answer.failure in _ENDED_AS_IT_SHOULD
            return answer
        finally:
            if not finished or self._num_jobs >= self._options.max_jobs_per_worker:
                await self.kill()

    async def kill(self) -> None:
        """End the process and everything that it started; does nothing when there is none."""
        process, self._process, self._num_jobs = self._process, None, 0
        folder, self._folder = self._folder, ""
        try:
            if process is not None:
                await self._end(process)
        finally:
            if folder:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        try:
            # The worker leads a process group of its own, so the processes that it started end with it.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("reward_worker_gone", pid=process.pid)
        await process.wait()
        await asyncio.to_thread(kill_marked, self._mark, process.pid)

    async def _answer(self, request: bytes, deadline_s: float | None, group_size: int | None) -> RewardAnswer:
        self.was_killed = False
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
            status = await self._status_at_end()
            self.was_killed = status is not None and status < 0
            how = "" if status is None else f": {ended_as(status)}"
            return _failed("crashed", f"the worker ended before the job, when it started or imported the function{how}")
        if answer.failure is not None:
            return answer
        if not answer.found:
            return _failed("crashed", "the worker does not say that it has found the function")
        if deadline_s is None:
            return answer
        try:
            async with asyncio.timeout(deadline_s):
                answer = await _read_answer(stdout)
        except TimeoutError:
            return RewardAnswer(found=True, failure="deadline", detail=f"not done after {deadline_s} s")
        except (ConnectionError, asyncio.IncompleteReadError):
            return await self._ended_during_job(process)
        self._num_jobs += 1
        num_rewards = None if answer.rewards is None else len(answer.rewards)
        is_missing = num_rewards != group_size or (group_size is None and answer.value is None)
        if answer.failure is None and is_missing:
            return _failed("crashed", "the worker answered neither with a reward nor with a failure")
        return answer

    async def _status_at_end(self) -> int | None:
        """How the process has ended; None when it has only closed its pipe, or ``close`` was first."""
        process = self._process
        if process is None or self._closed:
            return None
        try:
            # The pipe closes a moment before the process has ended, and only then it is known how.
            async with asyncio.timeout(_LAST_MOMENT_S):
                return await process.wait()
        except TimeoutError:
            log.debug("reward_worker_closed_its_pipe", pid=process.pid)
            return None

    async def _ended_during_job(self, process: asyncio.subprocess.Process) -> RewardAnswer:
        await self._status_at_end()
        await self.kill()
        await process.wait()  # ``close`` may have been first.
        if process.returncode == -signal.SIGXCPU:
            detail = f"the job used more than {self._options.cpu_s} s of CPU time"
            return RewardAnswer(found=True, failure="cpu_time", detail=detail)
        assert process.returncode is not None
        return _failed("crashed", f"the worker ended during the job: {ended_as(process.returncode)}")

    async def _running_process(self) -> asyncio.subprocess.Process:
        if self._process is None:
            options = self._options
            self._mark = new_mark()
            self._folder = tempfile.mkdtemp(prefix="gspo-reward-")
            file_bytes = options.scratch_file_bytes if options.scratch else MAX_FILE_BYTES
            self._process = await asyncio.create_subprocess_exec(
                *module_command(
                    "gspo_services.tasks.reward_worker", str(options.memory_bytes), str(options.cpu_s),
                    "network" if options.network else "none", str(file_bytes),
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**worker_environment(os.environ, self._folder), **options.environment, MARK: self._mark},
                start_new_session=True,
            )  # fmt: skip
            assert self._process.stdout is not None
            await self._read_isolation(self._process.stdout)
        if self._closed:
            raise ConnectionAbortedError("closed while the worker was starting")
        return self._process

    async def _read_isolation(self, stdout: asyncio.StreamReader) -> None:
        reason = (await _read_answer(stdout)).not_isolated
        if reason and not self._said_not_isolated:
            self._said_not_isolated = True
            log.warning(
                "reward_worker_not_isolated",
                reason=reason,
                meaning="reward code can reach the network; limits on memory, files and time hold",
            )


async def _read_answer(stream: asyncio.StreamReader) -> RewardAnswer:
    """The next answer; "crashed" for what no worker says."""
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        return _failed("crashed", f"the worker sent an answer of {length} bytes, {MAX_MESSAGE_BYTES} allowed")
    try:
        unpacked: Any = msgpack.unpackb(await stream.readexactly(length))
        return msgspec.convert(unpacked, RewardAnswer)
    except (ValueError, msgspec.ValidationError, msgpack.UnpackException) as error:
        return _failed("crashed", f"the worker sent what is no answer: {error}")


def _failed(reason: FailureReason, detail: str) -> RewardAnswer:
    return RewardAnswer(failure=reason, detail=detail)
