"""What a run's tasks expect, from the files or generators that made them. No code of a user runs for it."""

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from gspo.tasks.environments import Split, Task, TaskSource
from gspo_services.broker.refresh import read_additions
from gspo_services.broker.rows import AdditionRow
from gspo_services.broker.store import LEDGER_FILE, NoLedger, Reader, StoreCorrupt, reading
from gspo_services.shared.runtime.logs import quiet_logs
from gspo_services.shared.runtime.plain_text import one_line
from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments import MixedTasks, create_environment, create_task_set

CHARACTERS: Final = 120
FIELDS: Final = ("answer", "answers", "solution", "expected", "target", "gold")
"""Where tasks have what is expected."""
SETS: Final = "eval/"
"""Before the name of an evaluation set."""
_ERRORS: Final = (ValueError, OSError, StoreCorrupt)


class ExpectedAnswers:
    """The expected answers of one run. Its task sets are read once, which may take as long as the run's start took."""

    def __init__(self, directory: Path, settings: Settings, *, characters: int = CHARACTERS) -> None:
        """``characters``: an answer is cut there."""
        self._directory = directory
        self._settings = settings
        self._characters = characters
        self._sources: dict[str, TaskSource | str] = {}
        """By name; or why there is none."""

    def of(self, name: str, indices: Iterable[int]) -> tuple[dict[int, str], str]:
        """Return the answers by task, and why there are none or fewer.

        ``name``: "train", "eval" for the held-out tasks, or "eval/NAME" for those of an evaluation set.
        """
        wanted = list(indices)
        source = self._source(name)
        if isinstance(source, MixedTasks) and any(index >= source.num_tasks for index in wanted):
            # Tasks may have been added to the run since.
            del self._sources[name]
            source = self._source(name)
        if isinstance(source, str):
            return {}, source
        found: dict[int, str] = {}
        error = ""
        for index in wanted:
            try:
                found[index] = expected_of(source.task(index), self._characters)
            except IndexError:
                error = f"{name} task {index} is not there any more: its files are others than during the run"
            except _ERRORS as problem:
                error = f"{name} task {index}: {problem}"
        return found, error

    def _source(self, name: str) -> TaskSource | str:
        if name not in self._sources:
            try:
                self._sources[name] = self._opened(name)
            except _ERRORS as error:
                self._sources[name] = f"what {name} tasks expect cannot be read here: {error}"
        return self._sources[name]

    def _opened(self, name: str) -> TaskSource:
        settings = self._settings
        split: Split = "train" if name == "train" else "eval"
        if name.startswith(SETS):
            chosen = settings.evaluation.sets.get(name.removeprefix(SETS))
            if chosen is None:
                raise ValueError(f"the settings have no evaluation set {name.removeprefix(SETS)[:64]!r}")
            settings, split = settings.for_set(chosen), chosen.split
        environment = settings.environment
        if ":" in environment.name:
            raise ValueError(f"{environment.name} is code of your own, which does not run for it")
        create = create_task_set if settings.agent.is_used else create_environment
        with quiet_logs():
            source = create(environment.name, environment.options).tasks(split)
            if name == "train" and isinstance(source, MixedTasks):
                read_additions(self._directory, source, _additions(self._directory))
        return source


def _additions(directory: Path) -> list[AdditionRow]:
    try:
        with reading(directory) as connection, closing(connection):
            return Reader(directory / LEDGER_FILE, connection).rows(AdditionRow, "ORDER BY number")
    except NoLedger:
        return []


def expected_of(task: Task, characters: int = CHARACTERS) -> str:
    """What a task says of its answer; all but its prompt, where it has no column for it."""
    found: Any = next((task[name] for name in FIELDS if name in task), None)
    if found is None:
        found = {name: value for name, value in task.items() if name not in ("prompt", "messages", "question")}
    if isinstance(found, Mapping) and len(found) == 1:
        found = next(iter(found.values()))
    return one_line(found if isinstance(found, str) else json.dumps(found, default=str), characters)
