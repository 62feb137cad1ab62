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
from gspo_services.tasks.reward_worker.worker import MAX_MESSAGE_BYTES
from gspo_services.tasks.worker.reward_value import UnscoredError

_PASSING: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses of a service that is busy or starts again; any other error would be the same the next time."""
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0


class RewardService:
    """POSTs a job's arguments as JSON and expects {"reward": ...}: a number, or a map of named components.

    A grade has no side effects, so it is asked for again until the deadline where the service cannot be reached or is busy.
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
                body = await self._answer(job.url, request, failures)
            score = score_of(reward_in(body, f"the answer of {job.url}"), job.weights)
        except TimeoutError:
            return _late(job, failures)
        except (UnansweredError, UnreadableError, UnscoredError) as error:
            return no_reward(error.reason, str(error))
        return RewardResult(reward=score.reward, components=score.components)

    async def _answer(self, url: str, request: bytes, failures: list[UnansweredError]) -> bytes:
        """The first answer; ``failures`` gets the errors before it. Raises: UnansweredError that would come again."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._client.post(url, request)
            except UnansweredError as error:
                if self._client.is_closed or not (error.reason == "unreachable" or error.status in _PASSING):
                    raise
                failures.append(error)
            # At different times: the episodes of a rollout have lost the service together.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _late(job: RewardJob, failures: list[UnansweredError]) -> RewardResult:
    if not failures:
        return no_reward("deadline", f"{job.url} did not answer within {job.deadline_s} s")
    return no_reward(failures[-1].reason, f"{failures[-1]} (asked for {job.deadline_s} s, {len(failures)} times in vain)")
