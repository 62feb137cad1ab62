"""Which of several adapters a task belongs to: what a field of the task says (``lora.adapter_field``)."""

from collections.abc import Mapping, Sequence
from typing import Final

from gspo.tasks.environments import Task, TaskSource
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.tasks.environments import column_of

CHECKED: Final = 64
"""Tasks of an endless source that are looked at before the run begins; of a finite one all are."""


class TaskAdapters:
    """The adapters of the tasks of one run."""

    def __init__(self, names: Sequence[str], field: str, tasks: Mapping[str, TaskSource]) -> None:
        """``tasks`` by source: "train", "eval", or "eval/" and the name of a set."""
        self._names = frozenset(names)
        self._field = field
        self._tasks = tasks

    def of(self, source: str, index: int) -> str:
        """Return the adapter of a task; empty without several. Raises: ConfigurationError when the task names none of the
        run's; IndexError outside the source."""
        if not self._names:
            return ""
        try:
            return self.of_task(dict(self._tasks[source].task(index)))
        except ValueError as error:
            raise ConfigurationError(f"task {index} ({source}): {error}") from error

    def of_task(self, task: Task) -> str:
        """Return the adapter of this task; empty without several. Raises: ValueError when it names none of the run's."""
        if not self._names:
            return ""
        found = column_of(task, self._field, "lora.adapter_field says")
        if not isinstance(found, str) or found not in self._names:
            raise ValueError(
                f"{self._field} is {found!r:.100}, and lora.adapters are {', '.join(sorted(self._names))}: name it there, "
                "or leave such tasks out"
            )
        return found

    def require(self) -> None:
        """Look at the tasks before a run begins. Raises: ConfigurationError as ``of``, and for an adapter that no task of a
        finite training source has."""
        if not self._names:
            return
        for source, tasks in self._tasks.items():
            indices = range(CHECKED) if tasks.num_tasks is None else range(tasks.num_tasks)
            lacking = sorted(self._names - {self.of(source, index) for index in indices})
            if source == "train" and tasks.num_tasks is not None and lacking:
                raise ConfigurationError(
                    f"no training task has {lacking[0]!r} in {self._field!r}: that adapter would learn nothing; take it out "
                    "of lora.adapters, or add tasks"
                )
