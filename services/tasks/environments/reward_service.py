"""Rewards from a service: one POST for each, repeated while the service is away."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import msgspec

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments.reward_results import RewardResult, no_reward
from gspo_services.tasks.environments.scoring import score_of
from gspo_services.tasks.json_rewards import JsonClient, UnansweredError, UnreadableError, reward_in
from gspo_services.tasks.worker.frames import MAX_MESSAGE_BYTES
from gspo_services.tasks.worker.reward_value import UnscoredError

_PASSING: Final = frozenset({408, 425, 429})
"""Statuses of a service that is busy; all from 500 up are its own mishaps. Any other error would come again."""
_PATIENCE: Final = 0.5
"""The part of its deadline after which a request that has no answer is sent a second time, while the first one waits on."""
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0


class RewardService:
    """POSTs a job's arguments as JSON and expects {"reward": ...}: a number, or a map of named components.

    A grade has no side effects, so it is asked for again until the deadline where the service cannot be reached, is busy or
    fails, and a second time where it hangs. A service that says Retry-After is left alone for so long.
    There is no limit on requests at a time: a rollout's episodes have one (rollout.max_running).
    """

    def __init__(self) -> None:
        self._client = JsonClient()

    async def close(self) -> None:
        """Close all connections; requests under way end as unreachable."""
        await self._client.close()

    async def grade(self, job: RewardJob) -> RewardResult:
        """The reward of ``job``, or why there is none; a missed deadline is never worth 0, because the service is to blame.

        waits for:    the service's answer
        unblocked by: the deadline
        """
        try:
            request = msgspec.json.encode(job.arguments)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return no_reward("bad_job", f"the job's arguments are not plain data: {error}")
        if len(request) > MAX_MESSAGE_BYTES:
            return no_reward("too_large", f"a job of {len(request)} bytes; the limit is {MAX_MESSAGE_BYTES}")
        failures: list[UnansweredError] = []
        try:
            async with asyncio.timeout(job.deadline_s):
                body = await self._answer(job, request, failures)
            score = score_of(reward_in(body, f"the answer of {job.url}"), job.weights)
        except TimeoutError:
            return _late(job, failures)
        except (UnansweredError, UnreadableError, UnscoredError) as error:
            return no_reward(error.reason, str(error))
        return RewardResult(reward=score.reward, components=score.components)

    async def _answer(self, job: RewardJob, request: bytes, failures: list[UnansweredError]) -> bytes:
        """The first answer; ``failures`` gets the errors before it. Raises: UnansweredError that would come again."""
        pause_s = _FIRST_PAUSE_S
        while True:
            answer = await self._asked(job.url, request, job.deadline_s * _PATIENCE)
            if isinstance(answer, bytes):
                return answer
            if self._client.is_closed or not _passes(answer):
                raise answer
            failures.append(answer)
            # At different times: the episodes of a rollout have lost the service together.
            await asyncio.sleep((answer.retry_after_s or 0.0) + pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _asked(self, url: str, request: bytes, patience_s: float) -> bytes | UnansweredError:
        """The first answer to one request, or to its repetition after ``patience_s``; else the error that came last.

        The first request is not given up: a service may just be slow.
        """
        async with asyncio.TaskGroup() as group:
            asking = {group.create_task(self._posted(url, request), name="ask-reward-service")}
            await asyncio.wait(asking, timeout=patience_s)
            if not any(task.done() for task in asking):
                asking.add(group.create_task(self._posted(url, request), name="ask-reward-service-again"))
            while True:
                done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                answers = [task.result() for task in done]
                bodies = [answer for answer in answers if isinstance(answer, bytes)]
                if bodies or not asking:
                    for task in asking:
                        task.cancel()
                    return bodies[0] if bodies else answers[0]

    async def _posted(self, url: str, request: bytes) -> bytes | UnansweredError:
        try:
            return await self._client.post(url, request)
        except UnansweredError as error:
            return error


def _passes(error: UnansweredError) -> bool:
    """Whether the service may answer the next time."""
    return error.reason == "unreachable" or error.status in _PASSING or (error.status is not None and error.status >= 500)


def _late(job: RewardJob, failures: list[UnansweredError]) -> RewardResult:
    if not failures:
        return no_reward("deadline", f"{job.url} did not answer within {job.deadline_s} s")
    last = failures[-1]
    later = "" if last.retry_after_s is None else f"; it wants to be left alone for {last.retry_after_s:g} s"
    return no_reward(last.reason, f"{last} (asked for {job.deadline_s} s, {len(failures)} times in vain{later})")
