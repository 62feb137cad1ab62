"""The task of the measured runs: continue a line of letters; every answer has a reward, and rewards differ."""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from gspo.tasks.environments import Environment, Split, Start, State, Step, Task, TaskSource
from gspo_services.tasks.environments.generated import GeneratedTasks

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LettersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lengths of prompts."""

    shortest: Annotated[int, msgspec.Meta(ge=8, le=1024)] = 16
    """Letters of the shortest prompt."""
    longest: Annotated[int, msgspec.Meta(ge=8, le=1024)] = 48
    """Letters of the longest one."""


class Letters(Environment):
    """One turn; the reward is the share of ASCII letters in the answer, hardly ever equal, so that every group trains."""

    options_type = LettersOptions

    def __init__(self, options: LettersOptions) -> None:
        if options.shortest > options.longest:
            raise ValueError(f"shortest is {options.shortest} and longest is {options.longest}: it must not be larger")
        self._options = options

    def tasks(self, split: Split) -> TaskSource:
        """Endless lines of random letters."""
        return GeneratedTasks(self._draw, split, None)

    def start(self, task: Task, seed: int) -> Start:
        """Show the line."""
        return Start(state={}, messages=[{"role": "user", "content": str(task["problem"])}])

    def step(self, state: State, action: str) -> Step:
        """Grade the answer; the episode is over."""
        return Step(state=state, messages=[], reward=letter_share(action), done=True)

    def _draw(self, rng: random.Random) -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(self._options.shortest, self._options.longest)))


def letter_share(text: str) -> float:
    """Return the share of ASCII letters among the characters of ``text``; 0 for an empty one."""
    return sum(character.lower() in LETTERS for character in text) / len(text) if text else 0.0
