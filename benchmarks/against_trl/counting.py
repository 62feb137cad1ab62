"""A task whose answers have a long tail: counting down.

The policy reads "57>53=" and must answer "56,55,54,53": a short question with worked steps, of which there are as many
as the problem needs. With the options' defaults a right answer has 24 tokens (bytes and an end) in the mean, half of
them at most 18, one of twenty more than 66, and none more than 108.
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from services.environments.base import (
    DemonstratingEnvironment,
    DemonstrationMessage,
    Split,
    Start,
    State,
    Step,
    Task,
    TaskSource,
)
from services.environments.generated import GeneratedTasks, draw_problem

GIVES_UP_AT_ONCE = 0.25
"""How often the careless teacher has no mind to begin."""
GIVES_UP = 0.04
"""How often it stops at a step, each of them: the longer the answer, the rarer is a right one."""
SLIPS = 0.01
"""How often it leaves a number out, each time; it goes on from the next."""


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far is counted. Numbers have two digits."""

    mean_steps: Annotated[float, msgspec.Meta(ge=1, le=80)] = 8.0
    """How many numbers an answer has falls off exponentially, with about this mean."""
    most_steps: Annotated[int, msgspec.Meta(ge=1, le=80)] = 36
    """Longer ones are drawn again."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split has no end."""


class CountingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    problem: str


class Counting(DemonstratingEnvironment):
    """One count, one answer: 1 when every number is there and right, else 0."""

    options_type = CountingOptions

    def __init__(self, options: CountingOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> TaskSource:
        """Problems of one split; a problem is in one split only."""
        return GeneratedTasks(self._draw, split, self._options.num_eval_tasks if split == "eval" else None)

    def start(self, task: Task, seed: int) -> Start:
        """Ask; nothing in this environment is random."""
        problem = str(task["problem"])
        return Start(state={"problem": problem}, messages=[{"role": "user", "content": f"{problem}="}])

    def step(self, state: State, action: str) -> Step:
        """Compare the answer; the episode is over."""
        problem = msgspec.convert(state, CountingState).problem
        return Step(state=state, messages=[], reward=float(action.strip() == right_answer(problem)), done=True)

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        """A training problem with an answer: the right one, or that of the careless teacher."""
        problem = draw_problem(self._draw, "train", rng)
        answer = right_answer(problem) if careful else careless_answer(problem, rng)
        return [
            DemonstrationMessage("user", f"{problem}=", train=False),
            DemonstrationMessage("assistant", answer, train=True),
        ]

    def _draw(self, rng: random.Random) -> str:
        num_steps = self._options.most_steps + 1
        while num_steps > self._options.most_steps:
            num_steps = 1 + int(rng.expovariate(1 / (self._options.mean_steps - 0.5)))
        end = rng.randint(10, 99 - num_steps)
        return f"{end + num_steps}>{end}"


def right_answer(problem: str) -> str:
    """Every number below the first, down to the second: "20>17" gives "19,18,17". Raises ValueError for no problem."""
    start, end = _numbers(problem)
    return ",".join(str(each) for each in range(start - 1, end - 1, -1))


def careless_answer(problem: str, rng: random.Random) -> str:
    """Right up to where the teacher gives up ("?") or slips, and goes on from there."""
    number, end = _numbers(problem)
    if rng.random() < GIVES_UP_AT_ONCE:
        return "?"
    said: list[str] = []
    while number > end:
        if said and rng.random() < GIVES_UP:
            return ",".join([*said, "?"])
        number -= 2 if rng.random() < SLIPS else 1
        said.append(str(number))
    return ",".join(said)


def _numbers(problem: str) -> tuple[int, int]:
    start, between, end = problem.partition(">")
    if not (between and start.isdecimal() and end.isdecimal() and 10 <= int(end) < int(start) <= 99):
        raise ValueError(f"the problem is {problem!r}: it must be START>END, both of two digits, the first the larger")
    return int(start), int(end)
