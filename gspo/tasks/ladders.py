"""Ladders: tasks without end, in levels of rising difficulty. The broker climbs each ladder by its solve rate.

An environment whose training tasks are a ``LadderTasks`` has a curriculum. Which level a prompt has is decided when it is
sampled, and is part of the task's index: whoever knows the index knows the level. Needs the extra ``services``, as
``gspo.tasks.environments`` does.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from gspo.extras import needs_extras
from gspo.tasks.environments import Task

with needs_extras(__name__, "services"):
    import msgspec

__all__ = ["STRIDE", "Ladder", "LadderTasks", "Rung", "Rungs"]

STRIDE: Final = 2003
"""Levels of all ladders, at most. Every index of a run's tasks is made with it, so it stays as it is."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one kind, and the rule by which their level changes. Raises: ValueError for values without meaning."""

    name: str
    """Of its measures: 1 to 64 letters, digits, _, . and -."""
    weight: float = 1.0
    """Its share of the prompts is its weight over the sum of all."""
    first_level: int = 0
    """The level of the first prompts, and the lowest."""
    last_level: int = 0
    raise_at: float = 0.7
    """The solve rate from which the level rises..."""
    lower_at: float = 0.1
    """...and that up to which it falls."""
    num_groups: int = 8
    """Groups of one level that are judged together."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ValueError(f"a ladder is called {self.name[:100]!r}: use 1 to 64 letters, digits, _, . and -")
        if not 0 <= self.first_level <= self.last_level:
            raise ValueError(
                f"{self.name}: its levels are {self.first_level} to {self.last_level}: levels count from 0 upwards"
            )
        if not 0 <= self.lower_at < self.raise_at <= 1:
            raise ValueError(
                f"{self.name}: lower_at is {self.lower_at:g} and raise_at is {self.raise_at:g}: expected "
                "0 <= lower_at < raise_at <= 1"
            )
        if not 0 < self.weight < float("inf") or self.num_groups < 1:
            raise ValueError(
                f"{self.name}: weight is {self.weight:g} and num_groups is {self.num_groups}: both must be above 0"
            )


class Rung(NamedTuple):
    """One level of one ladder."""

    ladder: int
    level: int


class Rungs:
    """Which rung each task index is on: every index from 0 upwards is on one, and each rung has indices without end."""

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        """Raises: ValueError for two ladders of one name, and for more levels than ``STRIDE``."""
        names = [ladder.name for ladder in ladders]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'two ladders are called "{name}": give one of them another name')
        # The lowest levels first: whoever looks at the first tasks sees each ladder.
        self._rungs = sorted(
            (
                Rung(number, level)
                for number, ladder in enumerate(ladders)
                for level in range(ladder.first_level, ladder.last_level + 1)
            ),
            key=lambda rung: (rung.level - ladders[rung.ladder].first_level, rung.ladder),
        )
        if len(self._rungs) > STRIDE:
            raise ValueError(f"the ladders have {len(self._rungs)} levels in all, {STRIDE} allowed: use fewer ladders")
        self._places = {rung: place for place, rung in enumerate(self._rungs)}

    def rung(self, task_index: int) -> Rung:
        """The rung that ``task_index`` is on."""
        return self.in_turn(task_index % STRIDE)

    def in_turn(self, number: int) -> Rung:
        """Rung ``number``, counted round and round."""
        return self._rungs[number % len(self._rungs)]

    def task_index(self, rung: Rung, draw: int) -> int:
        """An index on ``rung`` that no other ``draw`` has."""
        return draw * STRIDE + self._places[rung]


class LadderTasks(ABC):
    """A ``TaskSource`` of ladders."""

    def __init__(self, ladders: Sequence[Ladder]) -> None:
        """Raises: ValueError, as ``Rungs`` does."""
        self.ladders = tuple(ladders)
        self._rungs = Rungs(self.ladders)

    @property
    def num_tasks(self) -> None:
        """Every index from 0 upwards has a task."""
        return None

    @property
    def digest(self) -> str:
        """What tasks depend on besides the configuration, such as a version: a run resumes only where it is the same."""
        return ""

    def task(self, index: int) -> Task:
        """The task at ``index``. Raises: IndexError below 0."""
        if index < 0:
            raise IndexError(f"task {index} does not exist: tasks count from 0 upwards")
        rung = self._rungs.rung(index)
        return self.draw(rung.ladder, rung.level, index)

    @abstractmethod
    def draw(self, ladder: int, level: int, index: int) -> Task:
        """The task at ``index``, which is on ``level`` of ``ladders[ladder]``: the same in every process, for ever."""
