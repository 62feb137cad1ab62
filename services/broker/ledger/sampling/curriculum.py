"""Decides at which level of its ladder a prompt is: groups of one level are judged together, and the level rises or falls.

A level is judged by groups that began at it. Those that began before a change, and end after it, say nothing.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from gspo.tasks.ladders import Ladder, Rung, Rungs
from gspo_services.broker.rows import LevelRow, TrajectoryRow

SOLVED: Final = 1.0
"""The reward of a solved task. Some verifiers give a few hundredths to every answer, so "above 0" says nothing."""


class Judged(NamedTuple):
    """What a group has changed."""

    rows: tuple[LevelRow, ...]
    line: dict[str, Any] | None
    """The line of metrics.jsonl, when the level changed."""


NOTHING: Final = Judged((), None)


class Curriculum:
    """The levels of a run's ladders."""

    def __init__(self, seed: int, ladders: Sequence[Ladder], rows: Iterable[LevelRow]) -> None:
        """``rows``: of a restarted broker. Without ladders there is nothing to ask."""
        self._seed = seed
        self._ladders = tuple(ladders)
        self._rungs = Rungs(ladders)
        self._rows = {number: LevelRow(ladder=number, level=each.first_level) for number, each in enumerate(ladders)}
        # A restart may have moved the first or the last level.
        self._rows |= {row.ladder: row for row in rows if row.ladder in self._rows and self._has_level(row)}

    @property
    def is_used(self) -> bool:
        """Whether the training tasks are on ladders."""
        return bool(self._ladders)

    def task_index(self, draw: int) -> int:
        """The task of the next prompt, ``draw``: a ladder by weight, at its level."""
        weights = [ladder.weight for ladder in self._ladders]
        (number,) = random.Random(f"{self._seed}:{draw}").choices(range(len(self._ladders)), weights)
        return self._rungs.task_index(Rung(number, self._rows[number].level), draw)

    def judge(self, task_index: int, members: Sequence[TrajectoryRow]) -> Judged:
        """Count a complete group."""
        if not self._ladders:
            return NOTHING
        number, level = self._rungs.rung(task_index)
        ladder, former = self._ladders[number], self._rows[number]
        if ladder.first_level == ladder.last_level or level != former.level:
            return NOTHING
        share = sum(row.reward >= SOLVED for row in members) / len(members)
        num_groups, solved = former.num_groups + 1, former.solved + share
        if num_groups < ladder.num_groups:
            return self._now(LevelRow(ladder=number, level=level, num_groups=num_groups, solved=solved))
        rate = solved / num_groups
        if rate >= ladder.raise_at:
            level = min(level + 1, ladder.last_level)
        elif rate <= ladder.lower_at:
            level = max(level - 1, ladder.first_level)
        judged = self._now(LevelRow(ladder=number, level=level))
        if level == former.level:
            return judged
        line = {"event": "level", "ladder": ladder.name, "number": number, "level": level, "solve_rate": rate}
        return judged._replace(line=line | {"num_groups": num_groups})

    def levels(self) -> dict[str, int]:
        """The level of each ladder, by name."""
        return {ladder.name: self._rows[number].level for number, ladder in enumerate(self._ladders)}

    def _now(self, row: LevelRow) -> Judged:
        self._rows[row.ladder] = row
        return Judged((row,), None)

    def _has_level(self, row: LevelRow) -> bool:
        ladder = self._ladders[row.ladder]
        return ladder.first_level <= row.level <= ladder.last_level
