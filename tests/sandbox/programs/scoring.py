"""Answers to rows, scored as a rollout scores them."""

import json
from pathlib import Path
from typing import Any

from gspo_services.tasks.environments import RewardPool, create_environment
from gspo_services.tasks.environments.reward_results import RewardResult

ADD = "print(sum(map(int, input().split())))"
ADDITION: dict[str, Any] = {
    "prompt": "Add two numbers.",
    "tests": [
        {"input": "1 2\n", "output": "3\n", "public": True},
        {"input": "40 2\n", "output": "42\n"},
        {"input": "-5 5\n", "output": "0\n"},
    ],
}


def fenced(program: str, tag: str = "python") -> str:
    return f"I think so.\n```{tag}\n{program}\n```\n"


class Scoring:
    """Scores answers."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def score(
        self, folder: Path, row: dict[str, Any], answer: str, environment: str = "code", **options: Any
    ) -> RewardResult:
        """Of an answer to a row, the only one of its file."""
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        played = create_environment(environment, {"train_path": str(path), **options})
        task = played.tasks("train").task(0)
        step = played.step(played.start(task, 0).state, answer)
        assert step.done
        assert not isinstance(step.reward, float)
        return await self._pool.grade(step.reward.for_task(task))


def ending(result: RewardResult) -> str:
    """What became of a program; exactly one component says it."""
    found = [name for name, value in result.components.items() if value and name != "tests_passed"]
    assert len(found) == 1, result
    return found[0]
