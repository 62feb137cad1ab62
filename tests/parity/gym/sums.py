"""Sums as reasoning-gym's chain_sum words them, for the cold start of a tiny model."""

from __future__ import annotations

import random

import msgspec

from gspo.tasks.environments import DemonstrationMessage, Start, State, Step, Task
from gspo_services.tasks.environments.generated import GeneratedEnvironment

QUESTION = "State the final answer to the following arithmetic problem: {} ="
RIGHT = 0.4
"""How often the careless teacher is; otherwise it shrugs."""


class SumsOptions(msgspec.Struct, frozen=True):
    """None."""


class WordedSums(GeneratedEnvironment):
    """Sums and differences of two or three small numbers."""

    options_type = SumsOptions

    def __init__(self, options: SumsOptions) -> None:
        super().__init__(num_eval_tasks=64)

    def draw(self, rng: random.Random) -> str:
        numbers = [str(rng.randint(0, 9)) for _ in range(rng.choice([2, 2, 3]))]
        return numbers[0] + "".join(f" {rng.choice('+-')} {number}" for number in numbers[1:])

    def start(self, task: Task, seed: int) -> Start:
        problem = str(task["problem"])
        return Start(state={"problem": problem}, messages=[{"role": "user", "content": QUESTION.format(problem)}])

    def step(self, state: State, action: str) -> Step:
        reward = float(action.strip() == value_of(str(state["problem"])))
        return Step(state=state, messages=[], reward=reward, done=True)

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        problem = self.training_problem(rng)
        said = value_of(problem) if careful or rng.random() < RIGHT else "?"
        return [
            DemonstrationMessage("user", QUESTION.format(problem), train=False),
            DemonstrationMessage("assistant", said, train=True),
        ]


def value_of(problem: str) -> str:
    """The value of a sum."""
    first, *rest = problem.split()
    total = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return str(total)
