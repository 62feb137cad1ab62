"""Environments with generated tasks: endless for training, a fixed number held out for evaluation."""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Callable

from gspo.tasks.environments import DemonstratingEnvironment, Split, Task, TaskSource

HELD_OUT_ONE_IN = 5
"""One problem in five is held out. Only its text decides, so every process and every order give the same split."""

MAX_DRAWS = 1_000


def split_of(problem: str) -> Split:
    """The split that ``problem`` belongs to, by a hash of its text (the same in every process and version)."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


class GeneratedEnvironment(DemonstratingEnvironment):
    """Base of environments whose tasks are drawn problems: {"problem": text}."""

    def __init__(self, num_eval_tasks: int) -> None:
        self._num_eval_tasks = num_eval_tasks

    @abstractmethod
    def draw(self, rng: random.Random) -> str:
        """Draw a problem of either split."""

    def tasks(self, split: Split) -> TaskSource:
        """Problems of one split; a problem is in one split only."""
        return GeneratedTasks(self.draw, split, self._num_eval_tasks if split == "eval" else None)

    def training_problem(self, rng: random.Random) -> str:
        """Draw a problem for a demonstration."""
        return draw_problem(self.draw, "train", rng)


class GeneratedTasks:
    """A ``TaskSource`` over a generator: task ``index`` is drawn from a random stream of its own."""

    def __init__(self, draw: Callable[[random.Random], str], split: Split, num_tasks: int | None) -> None:
        self._draw = draw
        self._split = split
        self._num_tasks = num_tasks

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are; None when they are endless."""
        return self._num_tasks

    def task(self, index: int) -> Task:
        """The task at ``index``: {"problem": text}. Raises: IndexError outside the source."""
        if index < 0 or (self._num_tasks is not None and index >= self._num_tasks):
            raise IndexError(f"task {index} does not exist: the {self._split} split has {self._num_tasks}")
        return {"problem": draw_problem(self._draw, self._split, random.Random(f"{self._split}:{index}"))}


def draw_problem(draw: Callable[[random.Random], str], split: Split, rng: random.Random) -> str:
    """Draw problems until one belongs to ``split``.

    Raises: ValueError when none does, because the generator knows too few problems.
    """
    for _ in range(MAX_DRAWS):
        problem = draw(rng)
        if split_of(problem) == split:
            return problem
    raise ValueError(f"none of {MAX_DRAWS} drawn problems belongs to the {split} split: allow more different ones")
