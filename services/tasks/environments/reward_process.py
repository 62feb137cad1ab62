"""One reward worker from the parent's side: a process that is killed when a job in it does not end as it should."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import tempfile
from typing import Final, get_args

import msgpack
import msgspec
import structlog

from gspo_protocol.messages.work import Components
from gspo_services.shared.runtime.lifecycle import module_command
from gspo_services.shared.runtime.stray_processes import ended_as
from gspo_services.tasks.environments.reward_results import FailureReason, RewardPoolOptions
from gspo_services.tasks.reward_worker.isolation import MAX_FILE_BYTES, worker_environment
from gspo_services.tasks.supervised import BadMessage, SupervisedProcess
from gspo_services.tasks.worker.reward_value import UnscoredReason

log = structlog.get_logger(__name__)

_ENDED_AS_IT_SHOULD: Final = (None, "raised", "unknown_function", "no_reward", "wrong_length", *get_args(UnscoredReason))
"""Failures of a job after which its worker takes the next one."""


class RewardAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker says; the code of the reward may also write into its socket."""

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
        self._process: SupervisedProcess | None = None
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
        """Let the worker grade ``request``. An early end kills the process, so no message stays half read.

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
                await process.end()
        finally:
            if folder:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _answer(self, request: bytes, deadline_s: float | None, group_size: int | None) -> RewardAnswer:
        self.was_killed = False
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                process = await self._running_process()
                process.send(request)
                answer = await _read_answer(process)
        except TimeoutError:
            return _failed("deadline", f"the worker was not ready within {self._options.start_timeout_s} s")
        except ConnectionError:
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
                answer = await _read_answer(process)
        except TimeoutError:
            return RewardAnswer(found=True, failure="deadline", detail=f"not done after {deadline_s} s")
        except ConnectionError:
            return await self._ended_during_job(process)
        self._num_jobs += 1
        num_rewards = None if answer.rewards is None else len(answer.rewards)
        is_missing = num_rewards != group_size or (group_size is None and answer.value is None)
        if answer.failure is None and is_missing:
            return _failed("crashed", "the worker answered neither with a reward nor with a failure")
        return answer

    async def _status_at_end(self) -> int | None:
        """How the process has ended; None when it has only closed its socket, or ``close`` was first."""
        process = self._process
        return None if process is None or self._closed else await process.status()

    async def _ended_during_job(self, process: SupervisedProcess) -> RewardAnswer:
        await self._status_at_end()
        await self.kill()
        await process.wait()  # ``close`` may have been first.
        if process.returncode == -signal.SIGXCPU:
            detail = f"the job used more than {self._options.cpu_s} s of CPU time"
            return RewardAnswer(found=True, failure="cpu_time", detail=detail)
        assert process.returncode is not None
        return _failed("crashed", f"the worker ended during the job: {ended_as(process.returncode)}")

    async def _running_process(self) -> SupervisedProcess:
        if self._process is None:
            options = self._options
            process = self._process = SupervisedProcess()
            self._folder = tempfile.mkdtemp(prefix="gspo-reward-")
            file_bytes = options.scratch_file_bytes if options.scratch else MAX_FILE_BYTES
            command = module_command(
                "gspo_services.tasks.reward_worker", str(options.memory_bytes), str(options.cpu_s),
                "network" if options.network else "none", str(file_bytes),
            )  # fmt: skip
            environment = {**worker_environment(os.environ, self._folder), **options.environment}
            await process.start_to_talk(command, environment)
            self._say_isolation((await _read_answer(process)).not_isolated)
        if self._closed:
            raise ConnectionAbortedError("closed while the worker was starting")
        return self._process

    def _say_isolation(self, reason: str | None) -> None:
        if reason and not self._said_not_isolated:
            self._said_not_isolated = True
            log.warning(
                "reward_worker_not_isolated",
                reason=reason,
                meaning="reward code can reach the network; limits on memory, files and time hold",
            )


async def _read_answer(process: SupervisedProcess) -> RewardAnswer:
    """The next answer; "crashed" for what no worker says. Raises: ConnectionError at the end of the connection."""
    try:
        return msgspec.convert(msgpack.unpackb(await process.receive()), RewardAnswer)
    except (BadMessage, ValueError, msgspec.ValidationError, msgpack.UnpackException) as error:
        return _failed("crashed", f"the worker sent what is no answer: {error}")


def _failed(reason: FailureReason, detail: str) -> RewardAnswer:
    return RewardAnswer(failure=reason, detail=detail)
