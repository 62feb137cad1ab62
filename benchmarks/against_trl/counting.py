"""A task whose answers have a long tail: counting down.

The policy reads "k04=" and must answer "04k,03k,02k,01k": a short question with as many worked steps as the problem needs.
With the default options a right answer has 24 tokens (bytes and an end) on average, and at most 108.
"""

from __future__ import annotations

import random
from string import ascii_lowercase
from typing import Annotated

import msgspec

from gspo.tasks.environments import (
    DemonstratingEnvironment,
    DemonstrationMessage,
    Split,
    Start,
    State,
    Step,
    Task,
    TaskSource,
)
from gspo_services.tasks.environments.generated import GeneratedTasks, draw_problem

GIVES_UP_AT_ONCE = 0.25
"""How often the careless teacher does not even begin."""
GIVES_UP = 0.08
"""How often it stops, at each step: the longer the answer, the rarer a right one."""
SLIPS = 0.02
"""How often it leaves out a number, at each step; it continues with the next."""


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far problems count down."""

    mean_steps: Annotated[float, msgspec.Meta(ge=1, le=99)] = 6.2
    """The number of items in an answer falls off exponentially, with about this mean."""
    most_steps: Annotated[int, msgspec.Meta(ge=1, le=99)] = 27
    """Longer answers are drawn again."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split is endless."""


class CountingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An episode before its only turn."""

    problem: str


class Counting(DemonstratingEnvironment):
    """One problem, one answer: 1 when every number is present and right, else 0."""

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
        """Return a training problem with an answer: the right one, or that of the careless teacher."""
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
        return f"{rng.choice(ascii_lowercase)}{num_steps:02}"


def right_answer(problem: str) -> str:
    """Return every number from the problem's to 1 with its letter: "k02" gives "02k,01k".

    Raises: ValueError for a text that is no problem.
    """
    letter, count = _parts(problem)
    return ",".join(f"{number:02}{letter}" for number in range(count, 0, -1))


def careless_answer(problem: str, rng: random.Random) -> str:
    """Answer right until the teacher gives up ("?"); where it leaves out a number, it continues with the next."""
    letter, number = _parts(problem)
    if rng.random() < GIVES_UP_AT_ONCE:
        return "?"
    said: list[str] = []
    while number > 0:
        if said and rng.random() < GIVES_UP:
            return ",".join([*said, "?"])
        if number > 1 and rng.random() < SLIPS:
            number -= 1
        said.append(f"{number:02}{letter}")
        number -= 1
    return ",".join(said)


def _parts(problem: str) -> tuple[str, int]:
    letter, digits = problem[:1], problem[1:]
    if not (letter and letter in ascii_lowercase and len(digits) == 2 and digits.isdecimal() and int(digits) > 0):
        raise ValueError(f"the problem is {problem!r}: it must be a letter and two digits, such as k04, and not 00")
    return letter, int(digits)
