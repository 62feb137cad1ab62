"""A task for models with random weights: words are numbers, and the reward is the share of even ones.

Any policy gets some reward for it, so that groups have a signal from the first batch on, whatever the model's size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gspo.tasks.environments import Environment, Start, Step

_NUMBER = re.compile(r"w(\d+)")


class _Prompts:
    num_tasks = None

    def __init__(self, split: str) -> None:
        self._first = 0 if split == "train" else 1_000_000_000

    def task(self, index: int) -> dict[str, int]:
        return {"number": self._first + index}


class EvenWords(Environment):
    """Answer with even words. A task's prompt is some words, made from its number."""

    def tasks(self, split: str) -> _Prompts:
        return _Prompts(split)

    def start(self, task: Mapping[str, Any], seed: int) -> Start:
        words = [(task["number"] * 7919 + place * 104_729) % 1000 for place in range(32)]
        return Start(state={}, messages=[{"role": "user", "content": " ".join(f"w{word}" for word in words)}])

    def step(self, state: Mapping[str, Any], action: str) -> Step:
        numbers = [int(number) for number in _NUMBER.findall(action)]
        even = sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
        return Step(state=dict(state), messages=[], reward=even, done=True)
