"""Rows of files as tasks, for agents: the function that plays an episode gets the row as it is."""

from __future__ import annotations

from typing import Any

import msgspec

from gspo.tasks.agents import require_plain_result
from gspo.tasks.environments import Split, Task, TaskSet, TaskSource
from gspo_protocol import limits
from gspo_protocol.messages.base import require_plain
from gspo_services.tasks.environments.sources import (
    OnBadRow,
    RowFilter,
    RowPlace,
    SourceOptions,
    TaskReading,
    tasks_of_split,
)


class RowsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the tasks."""

    train_path: str = ""
    """The training split: a file (.jsonl, .json, .csv, .parquet), a pattern such as data/train-*.parquet, or a folder; ~ and
    $NAME are filled in. "" when there is none."""
    eval_path: str = ""
    """The held-out split, likewise."""
    sources: tuple[SourceOptions, ...] = ()
    """In place of train_path: several, as {path, weight, name}. They are sampled in proportion to their weights."""
    on_bad_row: OnBadRow = "error"
    """A row that cannot be a task stops the run, or is counted and left out."""
    id_column: str = ""
    """The column that identifies a task, "a.b" for one inside another; "": its content does. The same row again is the same
    task."""
    filter: RowFilter = RowFilter()
    """Training rows to leave out: {min_chars, max_chars, pass_rate_column, min_pass_rate, max_pass_rate}."""


class Rows(TaskSet):
    """Each row of a file is a task, whatever its columns; an agent plays it."""

    options_type = RowsOptions

    def __init__(self, options: RowsOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's files, in their order. Raises: ValueError that names the file and line of a bad row."""
        options = self._options
        reading = TaskReading(_task_of_row, options.on_bad_row, options.id_column, options.filter)
        return tasks_of_split("rows task set", split, options, reading)


def plain_task(row: dict[str, Any]) -> Task:
    """The row as a task that the broker can lease and a worker can be sent. Raises: ValueError with what is wrong."""
    for column, value in row.items():
        try:
            require_plain_result(f'column "{column[:100]}"', value)
        except TypeError as error:
            raise ValueError(str(error)) from error
    require_plain("the row", row, limits.MAX_TASK_BYTES)
    return row


def _task_of_row(record: dict[str, Any], _where: RowPlace) -> tuple[Task, int]:
    return plain_task(record), num_characters(record)


def num_characters(value: Any) -> int:
    """The characters of all text in a plain value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(num_characters(each) for each in value.values())
    return sum(num_characters(each) for each in value) if isinstance(value, list) else 0
