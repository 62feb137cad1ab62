"""Sums in one turn: the policy reads "12+7=" and must answer "19" and nothing else."""

from __future__ import annotations

import random
from typing import Annotated, Literal

import msgspec

from gspo.tasks.environments import (
    DemonstrationMessage,
    Start,
    State,
    Step,
    Task,
)
from gspo_services.tasks.environments.expression import evaluate
from gspo_services.tasks.environments.generated import GeneratedEnvironment

Habit = Literal["right", "shrug", "hedge", "copy", "slip", "drop"]

CARELESS_HABITS: dict[Habit, float] = {
    "right": 0.36,
    "shrug": 0.54,
    "hedge": 0.03,
    "copy": 0.03,
    "slip": 0.02,
    "drop": 0.02,
}
"""How often the careless teacher has which habit. The right one is not the most frequent, so a model that imitates it and
decodes greedily shrugs: reinforcement has to find out which habit pays."""


class ArithmeticOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sums that are drawn."""

    max_operand: Annotated[int, msgspec.Meta(ge=9, le=999_999)] = 49
    """Operands are drawn from 0 to this number, evenly."""
    operators: Annotated[str, msgspec.Meta(pattern=r"^[-+*]+$", max_length=3)] = "+"
    """The operators that a problem may have, one character each: "+", "-", "*"."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split is endless."""


class ArithmeticState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    problem: str


class Arithmetic(GeneratedEnvironment):
    """One sum, one answer: reward 1 when it is exactly right, else 0."""

    options_type = ArithmeticOptions

    def __init__(self, options: ArithmeticOptions) -> None:
        super().__init__(options.num_eval_tasks)
        self._options = options

    def start(self, task: Task, seed: int) -> Start:
        """Ask for the sum; nothing in this environment is random."""
        problem = str(task["problem"])
        return Start(state={"problem": problem}, messages=[{"role": "user", "content": f"{problem}="}])

    def step(self, state: State, action: str) -> Step:
        """Compare the answer; the episode is over."""
        problem = msgspec.convert(state, ArithmeticState).problem
        reward = 1.0 if action.strip() == str(evaluate(problem)) else 0.0
        return Step(state=state, messages=[], reward=reward, done=True)

    def answer(self, task: Task, action: str) -> str | None:
        """The whole text."""
        return action.strip() or None

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        """A training sum with the right answer, or with the careless teacher's."""
        problem = self.training_problem(rng)
        habit: Habit = "right" if careful else _careless_habit(rng)
        return [
            DemonstrationMessage("user", f"{problem}=", train=False),
            DemonstrationMessage("assistant", _answer(problem, habit, rng), train=True),
        ]

    def draw(self, rng: random.Random) -> str:
        """Two operands and an operator."""
        left, right = rng.randint(0, self._options.max_operand), rng.randint(0, self._options.max_operand)
        return f"{left}{rng.choice(self._options.operators)}{right}"


def _careless_habit(rng: random.Random) -> Habit:
    return rng.choices(list(CARELESS_HABITS), weights=list(CARELESS_HABITS.values()))[0]


def _answer(problem: str, habit: Habit, rng: random.Random) -> str:
    right = str(evaluate(problem))
    match habit:
        case "right":
            return right
        case "shrug":
            return "?"
        case "hedge":
            return f"{right}?"
        case "copy":
            return problem
        case "slip":
            return right[:-1] + str((int(right[-1]) + rng.randint(1, 9)) % 10)
        case "drop":
            return right[:-1]
