"""Tasks of reasoning-gym: ladders for training, and a fixed number that is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
import structlog

from gspo.tasks.environments import Split, Task
from gspo.tasks.ladders import Ladder, LadderTasks, Rung, Rungs
from gspo_services.tasks.environments.generated import split_of
from gspo_services.tasks.environments.gym.options import UNSOUND, CurriculumOptions, GeneratorOptions, ReasoningGymOptions
from gspo_services.tasks.gym import Generator, GymRefused, GymUndrawn, Library

log = structlog.get_logger(__name__)

MAX_DRAWS: Final = 100
"""Of one task, until its question belongs to the split: one in five is held out."""
MAX_REFUSED: Final = 5
MOST_KEPT: Final = 256
"""The attempts at a task are leased one by one."""


class GymSource:
    """The generators of a configuration, with the levels that each has under it."""

    def __init__(self, options: ReasoningGymOptions, library: Library) -> None:
        """Raises: ValueError for generators or parameters that reasoning-gym refuses, and when it is not installed."""
        chosen = options.chosen()
        self._library = library
        self._seed = options.seed
        self.digest = f"reasoning-gym {library.version()}"
        chosen = chosen or [GeneratorOptions(name=name) for name in library.names() if name not in UNSOUND]
        self._generators = [Generator(name=each.name, parameters=each.parameters) for each in chosen]
        rules = options.rules
        found = [library.levels(generator) for generator in self._generators]
        self._levels = [levels if rules is not None else [] for levels in found]
        self.ladders = tuple(
            _ladder(each, rules or CurriculumOptions(), len(levels))
            for each, levels in zip(chosen, self._levels, strict=True)
        )

    def draw(self, split: Split, rung: Rung, index: int) -> Task:
        """Task ``index`` of a split. Raises: ValueError when it cannot be drawn."""
        generator = self._generators[rung.ladder]
        levels = self._levels[rung.ladder]
        level = levels[rung.level] if levels else None
        refused: list[GymRefused] = []
        for attempt in range(MAX_DRAWS):
            number = self._number(split, rung, index, attempt)
            try:
                found = self._library.draw(generator, level, number)
            except GymRefused as error:
                # Another task of the generator takes the place of one that it cannot make.
                refused.append(error)
                if isinstance(error, GymUndrawn):
                    # Where it is drawn, the task of this index is another one.
                    log.warning(
                        "task_replaced", split=split, index=index, generator=generator.name, level=level, number=number,
                        reason=str(error),
                    )  # fmt: skip
                if len(refused) >= MAX_REFUSED:
                    raise
                continue
            if split_of(found["question"]) == split:
                return _task(generator, level, number, found)
        at = "" if level is None else f" at level {level}"
        raise ValueError(
            f"none of {MAX_DRAWS} tasks of generator {generator.name!r}{at} belongs to the {split} split: it has too few "
            "different ones; choose other parameters or a higher first_level"
        )

    def _number(self, split: Split, rung: Rung, index: int, attempt: int) -> int:
        text = f"{self._seed}:{split}:{rung.ladder}:{rung.level}:{index}:{attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


class GymTraining(LadderTasks):
    """The training split: without end."""

    def __init__(self, source: GymSource) -> None:
        """Raises: ValueError for two generators of one label."""
        super().__init__(source.ladders)
        self._source = source
        self._drawn = lru_cache(maxsize=MOST_KEPT)(lambda rung, index: source.draw("train", rung, index))

    @property
    def digest(self) -> str:
        """The package and its version."""
        return self._source.digest

    def draw(self, ladder: int, level: int, index: int) -> Task:
        """See ``LadderTasks.draw``. Raises: ValueError."""
        return dict(self._drawn(Rung(ladder, level), index))


class GymHeldOut:
    """The held-out split: a ``TaskSource`` of all generators and all levels in turn."""

    def __init__(self, source: GymSource, num_tasks: int) -> None:
        """Raises: ValueError for two generators of one label."""
        self._rungs = Rungs(source.ladders)
        self._num_tasks = num_tasks
        self._drawn = lru_cache(maxsize=None)(lambda index: source.draw("eval", self._rungs.in_turn(index), index))

    @property
    def num_tasks(self) -> int:
        """How many tasks there are."""
        return self._num_tasks

    def task(self, index: int) -> Task:
        """Raises: IndexError outside 0 .. num_tasks - 1; ValueError when it cannot be drawn."""
        if not 0 <= index < self._num_tasks:
            raise IndexError(f"task {index} does not exist: the eval split has {self._num_tasks}")
        return dict(self._drawn(index))


def _ladder(chosen: GeneratorOptions, rules: CurriculumOptions, num_levels: int) -> Ladder:
    last = max(0, num_levels - 1)
    if rules.last_level is not None:
        last = min(last, rules.last_level)
    if rules.last_level is not None and rules.last_level < rules.first_level:
        raise ValueError(
            f"curriculum: first_level is {rules.first_level} and last_level is {rules.last_level}: the first is the lowest"
        )
    return Ladder(
        name=chosen.label or chosen.name, weight=chosen.weight, first_level=min(rules.first_level, last), last_level=last,
        raise_at=rules.raise_at, lower_at=rules.lower_at, num_groups=rules.num_groups,
    )  # fmt: skip


def _task(generator: Generator, level: int | None, number: int, found: Mapping[str, Any]) -> Task:
    """Parameters travel as JSON: they may hold any number. ``number`` says which of the generator's tasks it is."""
    parameters = msgspec.json.encode(generator.parameters, order="sorted").decode()
    return {"generator": generator.name, "level": level, "number": number, "parameters": parameters, **found}
