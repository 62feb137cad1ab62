"""Compares the answers of a whole group, when the broker asks this rollout to: ``reward.group``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from gspo.tasks.environments import RewardJob
from gspo_protocol.codec import Array
from gspo_protocol.errors import ProtocolError
from gspo_protocol.messages import Grade, Graded, GroupMember, Plain
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.work import EpisodeFailed, EpisodeIntake
from gspo_services.shared.settings import RewardSection
from gspo_services.tasks.environments import RewardPool, RewardResult, through_the_door
from gspo_services.tasks.worker.reward_value import UnscoredError, require_count

if TYPE_CHECKING:
    from gspo_services.rollout.tokenizer import ChatTokenizer

LONG_TOKENS: Final = 16_384
"""Above this many tokens a thread decodes: it takes some 20 ms, which would stall every episode."""


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """Everything that a comparison needs.

    produces:     Graded on the work channel
    waits for:    a free reward worker, then the function, at most ``reward.group_deadline_s``
    unblocked by: the function's result; the deadline
    """

    settings: RewardSection
    rewards: RewardPool
    tokenizer: ChatTokenizer
    broker: EpisodeIntake
    metrics: RolloutMetrics

    def begin(self, grade: Grade, arrays: Mapping[str, Array]) -> GroupComparison:
        """Make the work of a Grade. Nothing happens before ``run``."""
        return GroupComparison(self, grade, arrays["token_ids"])

    async def run(self, grade: Grade, token_ids: Array) -> None:
        """Compare and answer, whatever the function does. Raises: EpisodeFailed."""
        await through_the_door(self._run(grade, token_ids), self._refused, (EpisodeFailed,))

    async def _run(self, grade: Grade, token_ids: Array) -> None:
        if grade.num_tokens > LONG_TOKENS:
            completions = await asyncio.to_thread(self._texts, grade, token_ids)
        else:
            completions = self._texts(grade, token_ids)
        rewards = [each.reward for each in grade.members]
        arguments: Plain = {"completions": completions, "task": grade.task, "rewards": rewards}
        job = RewardJob(
            function=self.settings.group,
            arguments=arguments,
            deadline_s=self.settings.group_deadline_s,
            weights=self.settings.group_weights,
        )
        result = await self.rewards.grade(job, len(grade.members))
        if result.failure is not None:
            self._refused(result.failure, result.detail)
        found = list(zip(grade.members, result.of_answers, strict=True))
        try:
            graded = Graded(
                trajectory_id=grade.trajectory_id,
                epoch=grade.epoch,
                rewards=[_reward(each) for _, each in found],
                components=[_components(member, each) for member, each in found],
            )
            await self.broker.send(graded)
        except UnscoredError:
            raise
        except (ValueError, ProtocolError) as error:
            self._refused("not_finite", str(error))

    def _texts(self, grade: Grade, token_ids: Array) -> list[str]:
        """What each member said in its last turn, as an environment's step reads it."""
        stop_ids, begin = self.tokenizer.stop_ids, 0
        texts = []
        for member in grade.members:
            ids = token_ids[begin : begin + member.num_tokens].tolist()
            texts.append(self.tokenizer.action_text([token for token in ids if token not in stop_ids]))
            begin += member.num_tokens
        return texts

    def _refused(self, reason: str, detail: str) -> NoReturn:
        """Count a comparison without rewards, and end it."""
        self.metrics.reward_failures.labels(failure=reason).inc()
        raise EpisodeFailed(f"no rewards of the group: {reason}: {detail}")


class GroupComparison:
    """The ``EpisodeWork`` of one Grade."""

    num_tokens = 0
    is_in_user_code = True

    def __init__(self, groups: GroupRewards, grade: Grade, token_ids: Array) -> None:
        self._groups = groups
        self._grade = grade
        self._token_ids = token_ids

    async def run(self) -> None:
        """See ``EpisodeWork.run``."""
        await self._groups.run(self._grade, self._token_ids)

    async def send_rest(self) -> None:
        """Do nothing: a comparison that was cut off begins again elsewhere."""


def _reward(result: RewardResult) -> float:
    assert result.reward is not None
    return result.reward


def _components(member: GroupMember, result: RewardResult) -> dict[str, float]:
    """What an answer was worth alone is made of, and beside the others. Raises: UnscoredError for too many."""
    components = {**member.components, **result.components}
    require_count(len(components))
    return components
