"""TRL's own reward functions, unchanged, are worth what TRL's own call of them gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo_services.tasks.environments import RewardPool, RewardPoolOptions

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

PROMPT = [{"role": "user", "content": "What is a third?"}]
ANSWERS = (
    r"<think>1/3</think> \boxed{\frac{1}{3}}",
    r"So it is $\frac{1}{2}$.",
    r"\boxed{\frac{1}{3}}",
    r"<think>1/3",
    "",
)
NAMES = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def test_trls_functions_are_worth_the_same_here() -> None:
    import trl.rewards

    ids = [list(answer.encode()) for answer in ANSWERS]
    completions = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    columns = {"solution": [r"$\frac{1}{3}$"] * len(ANSWERS)}
    theirs = {
        name: getattr(trl.rewards, name)(
            prompts=[PROMPT] * len(ANSWERS), completions=completions, completion_ids=ids, **columns
        )
        for name in NAMES
    }
    ours = asyncio.run(graded(ids))
    assert ours == theirs
    assert len({tuple(values) for values in theirs.values()}) > 1


async def graded(ids: list[list[int]]) -> dict[str, list[Any]]:
    """What a worker with usual limits says."""
    task: Any = {"prompt": PROMPT, "solution": r"$\frac{1}{3}$"}
    found: dict[str, list[Any]] = {}
    async with RewardPool(RewardPoolOptions(num_workers=1)) as pool:
        for name in NAMES:
            for answer, token_ids in zip(ANSWERS, ids, strict=True):
                job = RewardJob(function=f"trl.rewards:{name}", form="trl", arguments={"completion": answer}, deadline_s=300)
                result = await pool.grade(job.for_task(task).for_turn(token_ids))
                assert result.failure is None, result
                found.setdefault(name, []).append(result.reward)
    return found
