"""Products in several turns: the policy may call a calculator before it answers.

The policy reads "34*57", may say "[34*57]", reads "1938" from the tool, and answers "1938". Any turn that is not
a call in square brackets is the answer and ends the episode.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from gspo.tasks.environments import (
    ChatMessage,
    DemonstrationMessage,
    Start,
    State,
    Step,
    Task,
)
from gspo_services.tasks.environments.expression import evaluate
from gspo_services.tasks.environments.generated import GeneratedEnvironment

SHRUG = "?"


class CalculatorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The problems that are drawn, and what a turn is worth."""

    max_operand: Annotated[int, msgspec.Meta(ge=9, le=999_999)] = 99
    """Operands are drawn from 2 to this number, evenly."""
    operators: Annotated[str, msgspec.Meta(pattern=r"^[-+*]+$", max_length=3)] = "*"
    """The operators that a problem may have, one character each: "+", "-", "*"."""
    max_turns: Annotated[int, msgspec.Meta(ge=2, le=64)] = 3
    """Assistant turns of an episode; a call in the last turn ends it without an answer."""
    call_reward: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.0
    """Reward of a turn that calls the tool with a valid expression: a bonus above 0, a price below 0."""
    bad_call_reward: Annotated[float, msgspec.Meta(ge=-1, le=1)] = 0.0
    """Reward of a turn that calls the tool with anything else."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split is endless."""


class CalculatorState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode between two turns."""

    problem: str
    num_turns: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class Calculator(GeneratedEnvironment):
    """One problem, a few calls, one answer: reward 1 when it is exactly right, plus the rewards of the calls."""

    options_type = CalculatorOptions

    def __init__(self, options: CalculatorOptions) -> None:
        super().__init__(options.num_eval_tasks)
        self._options = options

    def start(self, task: Task, seed: int) -> Start:
        """Ask for the value; nothing in this environment is random."""
        problem = str(task["problem"])
        return Start(state={"problem": problem, "num_turns": 0}, messages=[_question(problem)])

    def step(self, state: State, action: str) -> Step:
        """Answer a call, or take the answer and end the episode."""
        before = msgspec.convert(state, CalculatorState)
        after: State = {"problem": before.problem, "num_turns": before.num_turns + 1}
        said = action.strip()
        if not (said.startswith("[") and said.endswith("]")):
            reward = 1.0 if said == str(evaluate(before.problem)) else 0.0
            return Step(state=after, messages=[], reward=reward, done=True)
        try:
            output, reward = str(evaluate(said[1:-1])), self._options.call_reward
        except ValueError as error:
            output, reward = f"error: {error}", self._options.bad_call_reward
        done = before.num_turns + 1 >= self._options.max_turns
        messages: list[ChatMessage] = [] if done else [{"role": "tool", "content": output}]
        return Step(state=after, messages=messages, reward=reward, done=done)

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        """A training problem with a call and an answer, or with the careless teacher's turns."""
        problem = self.training_problem(rng)
        turns = [DemonstrationMessage("user", _question(problem)["content"], train=False)]
        said = f"[{problem}]" if careful else _careless_first_turn(problem, rng)
        turns.append(DemonstrationMessage("assistant", said, train=True))
        if not said.startswith("["):
            return turns
        output = str(evaluate(said[1:-1]))
        turns.append(DemonstrationMessage("tool", output, train=False))
        answer = output if careful else _careless_answer(output, rng)
        turns.append(DemonstrationMessage("assistant", answer, train=True))
        return turns

    def draw(self, rng: random.Random) -> str:
        """Two operands and an operator."""
        left, right = rng.randint(2, self._options.max_operand), rng.randint(2, self._options.max_operand)
        return f"{left}{rng.choice(self._options.operators)}{right}"


def _question(problem: str) -> ChatMessage:
    return {"role": "user", "content": problem}


def _careless_first_turn(problem: str, rng: random.Random) -> str:
    """The careless teacher's first turn: it mostly calls or shrugs, and sometimes guesses, or adds where it should not."""
    habit = rng.choices(["call", "shrug", "guess", "add"], weights=[0.44, 0.52, 0.02, 0.02])[0]
    match habit:
        case "call":
            return f"[{problem}]"
        case "shrug":
            return SHRUG
        case "guess":
            return str(rng.randint(10, 9999))
        case _:
            return f"[{problem.replace('*', '+').replace('-', '+')}]"


def _careless_answer(output: str, rng: random.Random) -> str:
    """The careless teacher's answer to a tool's output: it reads it out, hedges, or shrugs."""
    return rng.choices([output, f"{output}?", SHRUG], weights=[0.86, 0.07, 0.07])[0]
