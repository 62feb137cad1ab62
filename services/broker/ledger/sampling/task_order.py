"""Decides which task a prompt is and which seed a trajectory has: pure functions of the run's seed."""

import hashlib
import random
from typing import Final

SEED_BITS: Final = 31
"""Fits every engine's and environment's idea of a seed."""


class TaskOrder:
    """Order of the training tasks. A finite source is used again and again, each time in its own shuffle; an endless one
    is used from index 0 up.
    """

    def __init__(self, seed: int, num_tasks: int | None) -> None:
        """Raises: ValueError when there is nothing to train on."""
        if num_tasks is not None and num_tasks < 1:
            raise ValueError("the environment has 0 training tasks: there is nothing to sample trajectories for")
        self._seed = seed
        self._num_tasks = num_tasks
        self._repetition = -1
        self._shuffled: list[int] = []

    def task_index(self, prompt: int) -> int:
        """Index in the task source of the ``prompt``-th prompt of the run (0, 1, 2, ...)."""
        if self._num_tasks is None:
            return prompt
        repetition, position = divmod(prompt, self._num_tasks)
        if repetition != self._repetition:
            self._shuffled = list(range(self._num_tasks))
            random.Random(f"{self._seed}:{repetition}").shuffle(self._shuffled)
            self._repetition = repetition
        return self._shuffled[position]


def trajectory_seed(run_seed: int, trajectory_id: int) -> int:
    """Seed of one trajectory: the same on every engine, however often it is resumed."""
    digest = hashlib.blake2b(f"{run_seed}:{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
