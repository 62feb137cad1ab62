"""Compares the episodes that were played of one task, as a run's rollout compares a group."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gspo.tasks.environments import Split, Task
from gspo_protocol.codec import Array
from gspo_protocol.messages import Grade, Graded, GroupMember
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.runs.local_play import LocalIntake, told
from gspo_services.shared.settings import Settings


def played_of_each(settings: Settings, split: Split) -> int:
    """How many episodes of a task are played: a group, where its answers are compared."""
    return settings.batch.group_size if settings.reward.group and split == "train" else 1


@dataclass(kw_only=True)
class PlayedAnswers:
    """What the episodes of one task have said, and what each is worth alone."""

    members: list[GroupMember] = field(default_factory=list)
    token_ids: list[Array] = field(default_factory=list)

    def add(self, intake: LocalIntake) -> None:
        """Add the episode that has just finished there."""
        finish, answer = intake.finish, intake.last_answer
        assert finish is not None
        member = GroupMember(num_tokens=len(answer), reward=sum(finish.turn_rewards), components=finish.components)
        self.members.append(member)
        self.token_ids.append(answer)


async def compared(groups: GroupRewards, intake: LocalIntake, task: Task, answers: PlayedAnswers) -> Graded | str:
    """The rewards of the answers beside each other, or why there are none."""
    grade = Grade(trajectory_id=0, epoch=1, group_id=0, task=task, members=answers.members)
    try:
        await groups.begin(grade, {"token_ids": _joined(answers.token_ids)}).run()
    except EpisodeFailed as error:
        return told(error)
    assert intake.graded is not None
    return intake.graded


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, "<i4"), *parts])
