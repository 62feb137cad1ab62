"""A rollout compares the answers of a group, as a Grade has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from gspo.tasks.environments import RewardJob
from gspo_protocol.messages import Grade, Graded, GroupMember
from gspo_services.rollout.group_rewards import GroupRewards
from gspo_services.rollout.metrics import RolloutMetrics
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.rollout.work import EpisodeFailed
from gspo_services.shared.settings.sections import RewardSection
from gspo_services.tasks.environments import RewardResult
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.episodes import RecordingBroker


class Comparing:
    """In place of the pool of workers: keeps the job, and has this result."""

    def __init__(self, result: RewardResult) -> None:
        self.result = result
        self.jobs: list[tuple[RewardJob, int]] = []

    async def grade(self, job: RewardJob, group_size: int) -> RewardResult:
        self.jobs.append((job, group_size))
        return self.result


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    return ChatTokenizer(save_chat_model(directory, chat_tokenizer(TINY_TEMPLATE, "<|end|>")))


async def compared(
    tokenizer: ChatTokenizer,
    texts: list[str],
    result: RewardResult,
    components: dict[str, float],
    registry: CollectorRegistry,
) -> tuple[Comparing, RecordingBroker]:
    """``components``: of what each answer is worth alone."""
    pool: Any = Comparing(result)
    broker, metrics = RecordingBroker(), RolloutMetrics(registry)
    settings = RewardSection(group="my_rewards:rank", group_deadline_s=7.0, group_weights={"a": 2.0})
    groups = GroupRewards(settings=settings, rewards=pool, tokenizer=tokenizer, broker=broker, metrics=metrics)
    answers = [[*tokenizer.encode(text), *tokenizer.stop_ids] for text in texts]
    members = [
        GroupMember(num_tokens=len(ids), reward=place / 4, components=components) for place, ids in enumerate(answers)
    ]
    grade = Grade(trajectory_id=7, epoch=3, group_id=1, task={"answer": "4"}, members=members)
    token_ids = np.array([token for ids in answers for token in ids], np.int32)
    await groups.begin(grade, {"token_ids": token_ids}).run()
    return pool, broker


def rewards(*values: float, **components: float) -> RewardResult:
    return RewardResult(reward=None, of_answers=[RewardResult(reward=value, components=components) for value in values])


async def test_the_function_gets_the_texts_in_order_and_the_broker_the_rewards(tokenizer: ChatTokenizer) -> None:
    """Of two components of one name, the group's counts."""
    result, alone = rewards(3.0, -1.0, 0.0, beside=0.5, right=0.25), {"right": 1.0, "short": 0.0}
    pool, broker = await compared(tokenizer, ["four", "It is 2", ""], result, alone, CollectorRegistry())
    ((job, size),) = pool.jobs
    assert (job.function, job.deadline_s, job.weights, size) == ("my_rewards:rank", 7.0, {"a": 2.0}, 3)
    assert job.arguments == {
        "completions": ["four", "It is 2", ""], "task": {"answer": "4"}, "rewards": [0.0, 0.25, 0.5]
    }  # fmt: skip
    assert broker.messages == [
        Graded(
            trajectory_id=7, epoch=3, rewards=[3.0, -1.0, 0.0], components=[{"right": 0.25, "short": 0.0, "beside": 0.5}] * 3
        )
    ]


@pytest.mark.parametrize(
    ("result", "components", "reason", "text"),
    [
        (
            RewardResult(reward=None, failure="wrong_length", detail="3 rewards"),
            {},
            "wrong_length",
            "wrong_length: 3 rewards",
        ),
        (rewards(1.0, 1e7), {}, "not_finite", "rewards[1] has a sum of absolute values of 1e+07"),
        (rewards(1.0, 1.0, beside=1e7), {}, "not_finite", "components[0]['beside'] is 10000000.0"),
        (rewards(1.0, 1.0, beside=1.0), {f"c{n}": 1.0 for n in range(16)}, "bad_component", "17 components, 16 allowed"),
    ],
)
async def test_what_the_broker_would_not_take_is_a_failed_attempt_and_counted(
    tokenizer: ChatTokenizer, result: RewardResult, components: dict[str, float], reason: str, text: str
) -> None:
    registry = CollectorRegistry()
    with pytest.raises(EpisodeFailed) as raised:
        await compared(tokenizer, ["a", "b"], result, components, registry)
    assert text in str(raised.value)
    assert f"no rewards of the group: {reason}" in str(raised.value)
    assert registry.get_sample_value("gspo_rollout_reward_failures_total", {"failure": reason}) == 1
