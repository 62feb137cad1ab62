"""Decides which task comes next: several sources with weights, and tasks added during the run.

The draws depend only on the run's seed, the sources and the additions, so that a restarted broker continues
with the same tasks. A prompt takes the next draw whose task does not rest (see ``rests.py``).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_services.broker.rows import AdditionRow


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """A source of training tasks. Its first tasks follow those of the source before it; added tasks follow all of them."""

    name: str
    weight: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class AddedTasks:
    """Tasks added during the run; see ``AdditionRow`` for the fields."""

    source: str
    name: str
    digest: str
    first_task: int
    num_tasks: int


class TaskSchedule:
    """The draws of a run. Memory: two integers for each task."""

    def __init__(self, seed: int, sources: Sequence[SourceShare], additions: Sequence[AdditionRow] = ()) -> None:
        """Without sources tasks are endless, each index once. Raises: ValueError when there is nothing to train on."""
        if sources and not sum(source.num_tasks for source in sources):
            raise ValueError("the environment has 0 training tasks: there is nothing to sample trajectories for")
        self._seed = seed
        self._sources = tuple(sources)
        self._additions = list(additions)
        self.num_tasks: int | None = sum(source.num_tasks for source in sources) if sources else None
        for addition in additions:
            self._count(addition)
        self._begin()

    def task_index(self, draw: int) -> int:
        """Index in the task source of draw 0, 1, 2, ...: fastest in order."""
        if not self._sources:
            return draw
        if draw < self._next - 1:
            self._begin()
        while self._next <= draw:
            self._draw()
        return self._last

    def add(self, added: AddedTasks, next_draw: int) -> AdditionRow:
        """Add tasks from draw ``next_draw`` on. Raises: ValueError for endless tasks and for an unknown source."""
        if added.source not in self.source_names:
            names = ", ".join(self.source_names) or "tasks without end, and nothing to add to"
            raise ValueError(f'there is no source "{added.source}": the run has {names}')
        # A run that was restored to an earlier batch has additions that are still to come.
        at_draw = max([next_draw, *(row.at_draw for row in self._additions[-1:])])
        row = AdditionRow(
            number=len(self._additions) + 1,
            source=added.source,
            name=added.name,
            digest=added.digest,
            first_task=added.first_task,
            num_tasks=added.num_tasks,
            at_draw=at_draw,
        )
        self._additions.append(row)
        self._count(row)
        return row

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self._sources)

    def _count(self, addition: AdditionRow) -> None:
        assert self.num_tasks is not None
        self.num_tasks = max(self.num_tasks, addition.first_task + addition.num_tasks)

    def _begin(self) -> None:
        self._next = 0
        self._last = 0
        self._num_applied = 0
        self._drawn = [0] * len(self._sources)
        self._passes: list[_Passes] = []
        first = 0
        for place, source in enumerate(self._sources):
            # The first source's order does not depend on whether there are others.
            salt = f":{place}" if place else ""
            self._passes.append(_Passes(self._seed, salt, range(first, first + source.num_tasks)))
            first += source.num_tasks

    def _draw(self) -> None:
        while self._num_applied < len(self._additions) and self._additions[self._num_applied].at_draw <= self._next:
            addition = self._additions[self._num_applied]
            place = self.source_names.index(addition.source)
            self._passes[place].add(range(addition.first_task, addition.first_task + addition.num_tasks))
            self._num_applied += 1
        place = self._place()
        self._drawn[place] += 1
        self._last = self._passes[place].take()
        self._next += 1

    def _place(self) -> int:
        """The source that is furthest behind its share of the draws."""
        total = sum(source.weight for source in self._sources)
        behind = [
            source.weight / total * (self._next + 1) - drawn
            for source, drawn in zip(self._sources, self._drawn, strict=True)
        ]
        return behind.index(max(behind))


class _Passes:
    """One source: repeated passes over its tasks, each in a new order."""

    def __init__(self, seed: int, salt: str, tasks: Sequence[int]) -> None:
        self._seed = seed
        self._salt = salt
        self._tasks = list(tasks)
        self._pass = -1
        self._left: list[int] = []
        """The rest of the current pass, in reverse order."""

    def take(self) -> int:
        if not self._left:
            self._pass += 1
            self._left = list(self._tasks)
            self._shuffle("")
        return self._left.pop()

    def add(self, tasks: Sequence[int]) -> None:
        """Mix new tasks into the rest of the current pass."""
        self._tasks += tasks
        if self._pass >= 0:
            self._left += tasks
            self._shuffle(f":{len(self._tasks)}")

    def _shuffle(self, more: str) -> None:
        random.Random(f"{self._seed}:{self._pass}{self._salt}{more}").shuffle(self._left)
        self._left.reverse()
