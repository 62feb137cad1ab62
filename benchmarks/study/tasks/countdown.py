"""The study's long task: the policy reads "87-4" and counts down, "83 79 75 ... 03", until nothing more can be taken.

Every answer is a chain of small steps that must all be right: 6 to 20 numbers, 18 to 60 tokens, and longer chains are
harder. The careless teacher slips or gives up at every step with the same small probability. A model that imitates it is
right about half of the time and errs anywhere in the chain: reinforcement has to find thousands of small decisions, where
the arithmetic task has one large one.

The same task with three digits is the study's longest: "287-9" is answered by "278 269 260 ... 008", 25 to 40 numbers, 100
to 160 tokens.
"""

from __future__ import annotations

import random
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

GIVE_UP = "?"
START_RANGES = {2: range(20, 100), 3: range(100, 1000)}
"""The first numbers, by digits."""


class CountdownOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lengths of chains, and how often the careless teacher errs."""

    digits: Annotated[int, msgspec.Meta(ge=2, le=3)] = 2
    """Of each number."""
    min_numbers: Annotated[int, msgspec.Meta(ge=1)] = 6
    """Shortest chain; a number is its digits and a blank or the end."""
    max_numbers: Annotated[int, msgspec.Meta(ge=1)] = 20
    """Longest chain."""
    slip: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.03
    """Probability that the careless teacher writes a wrong number, at each number; the chain continues from it."""
    give_up: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.03
    """Probability that the careless teacher ends with "?" instead of a number, at each number."""
    num_eval_tasks: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Size of the held-out split; the training split is endless."""


class Countdown(DemonstratingEnvironment):
    """One chain, one answer: 1 when every number is right, else 0."""

    options_type = CountdownOptions

    def __init__(self, options: CountdownOptions) -> None:
        self._options = options
        self._problems = [
            f"{start}-{step}"
            for start in START_RANGES[options.digits]
            for step in range(2, 10)
            if options.min_numbers <= start // step <= options.max_numbers
        ]
        if not self._problems:
            raise ValueError(f"no chain has {options.min_numbers} to {options.max_numbers} numbers: allow others")

    def tasks(self, split: Split) -> TaskSource:
        """Chains of one split; a chain is in one split only."""
        return GeneratedTasks(self._draw, split, self._options.num_eval_tasks if split == "eval" else None)

    def start(self, task: Task, seed: int) -> Start:
        """Give start and step; nothing in this environment is random."""
        problem = str(task["problem"])
        return Start(state={"problem": problem}, messages=[{"role": "user", "content": problem}])

    def step(self, state: State, action: str) -> Step:
        """Compare the whole chain; the episode is over."""
        reward = 1.0 if action == right_chain(str(state["problem"])) else 0.0
        return Step(state=state, messages=[], reward=reward, done=True)

    def demonstration(self, rng: random.Random, *, careful: bool) -> list[DemonstrationMessage]:
        """Return a training chain: the right one, or that of the careless teacher."""
        problem = draw_problem(self._draw, "train", rng)
        chain = right_chain(problem) if careful else self._careless_chain(problem, rng)
        return [
            DemonstrationMessage("user", problem, train=False),
            DemonstrationMessage("assistant", chain, train=True),
        ]

    def _draw(self, rng: random.Random) -> str:
        return rng.choice(self._problems)

    def _careless_chain(self, problem: str, rng: random.Random) -> str:
        start, step = (int(part) for part in problem.split("-"))
        digits = self._options.digits
        words: list[str] = []
        while start >= step:
            if rng.random() < self._options.give_up:
                return " ".join([*words, GIVE_UP])
            start -= step
            if rng.random() < self._options.slip:
                start = max(0, start + rng.choice((-1, 1)))
            words.append(f"{start:0{digits}d}")
        return " ".join(words)


def right_chain(problem: str) -> str:
    """Return the answer to "start-step": start - step, start - 2 step, ..., the remainder, each as long as the start."""
    first, _, taken = problem.partition("-")
    start, step = int(first), int(taken)
    return " ".join(f"{number:0{len(first)}d}" for number in range(start - step, -1, -step))
