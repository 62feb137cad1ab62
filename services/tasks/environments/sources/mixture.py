"""Several sources of tasks with weights, read once, with tasks added to them later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import structlog

from gspo.tasks.environments import Plain, Split, Task
from gspo_services.shared.runtime.paths import expanded
from gspo_services.tasks.environments.sources.accounting import Accounting, ColumnUse, Roles
from gspo_services.tasks.environments.sources.files import as_mapping, rows_of
from gspo_services.tasks.environments.sources.filters import RowFilter
from gspo_services.tasks.environments.sources.identity import (
    IdentifiedTask,
    KnownTasks,
    digest_of,
    identity_of,
    row_key,
)
from gspo_services.tasks.environments.sources.shards import EXPECTED, label_of

log = structlog.get_logger(__name__)
READING: Final = "dataset_reading"
"""The event of a file that takes long."""
SAID_S: Final = 5.0

OnBadRow = Literal["error", "skip"]
"""A row that cannot be used stops the run, or is counted and left out."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of training tasks."""

    path: str
    """As train_path: a file, a pattern such as data/train-*.parquet, or a folder."""
    weight: float = 1.0
    """How often its tasks are sampled, beside the weights of the others."""
    name: str = ""
    """What it is called in metrics; "": the name of the file or folder."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(
                f"the source {self.path} has the weight {self.weight:g}: no task of it would ever be sampled; give a weight "
                "above 0, or leave the source out"
            )

    @property
    def label(self) -> str:
        return self.name or label_of(self.path)


class TaskSourcePart(NamedTuple):
    """A source as the order of tasks needs it."""

    name: str
    weight: float
    num_tasks: int


class RowPlace(NamedTuple):
    """Where a row is."""

    file: Path
    place: str
    """Such as "line 3" or "row 3"."""


class TaskReading(NamedTuple):
    """How rows become tasks."""

    task: Callable[[dict[str, Any], RowPlace], tuple[Task, int] | None]
    """The task of a row, and the characters of its prompt; None for one that the options leave out. It raises ValueError
    for a row that cannot be used."""
    on_bad_row: OnBadRow = "error"
    id_column: str = ""
    filter: RowFilter = RowFilter()
    kept_by: str = "the filter"
    """What leaves rows out, for people."""
    content: Callable[[Task], object] = lambda task: task
    """What of a task makes it this task, wherever it lies."""
    same_answer: Callable[[Plain, Plain], bool] | None = None
    """Whether two answers to the same "prompt" of tasks are the same "answer"; None where rows cannot contradict each
    other."""
    layout: Callable[[dict[str, Any]], str] = lambda record: ""
    """How a row is laid out, for people; all rows of a source are alike. It raises ValueError as ``task`` does."""
    roles: Callable[[Mapping[str, Any]], Roles] | None = None
    """The columns of a row that are used; None where every task is its whole row. It raises ValueError as ``task`` does."""
    split: Split = "train"
    """The shards of a folder that are read."""


@dataclass
class _Adding:
    """Rows of one path on their way."""

    rows: list[IdentifiedTask] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)
    layout: str | None = None
    laid_out_at: str = ""
    columns: Accounting | None = None
    num_bad: int = 0
    num_filtered: int = 0
    num_repeated: int = 0


class MixedTasks:
    """A ``TaskSource`` over the tasks of one or more sources, one source after another."""

    def __init__(self, reading: TaskReading) -> None:
        self._reading = reading
        self._rows: list[IdentifiedTask] = []
        self._known = KnownTasks()
        # A row that is there a hundred times (DAPO) is read once: reading takes most of the time.
        self._keys: set[int] = set()
        self.parts: tuple[TaskSourcePart, ...] = ()
        """The sources as they were read at the start."""
        self.layouts: list[str] = []
        """How the rows of each path are laid out, as far as that was recognised."""
        self.columns: list[ColumnUse] = []
        """What became of the columns of each path, where rows are not taken whole."""
        self.num_repeated = 0
        """Rows that are tasks of rows before them."""

    @property
    def num_tasks(self) -> int:
        """How many usable rows there are, each counted once."""
        return len(self._rows)

    @property
    def digest(self) -> str:
        """Of the identities of all tasks, in their order."""
        return self._known.digest()

    def task(self, index: int) -> Task:
        """Row ``index``. Raises: IndexError outside 0 .. num_tasks - 1."""
        return self._row(index).task

    def identity(self, index: int) -> str:
        """What task ``index`` is known by, in this run and in others. Raises: IndexError."""
        return self._row(index).identity

    def _row(self, index: int) -> IdentifiedTask:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"task {index} does not exist: there are {len(self._rows)}")
        return self._rows[index]

    def add(self, path: Path, require: Callable[[Task], object] | None = None) -> int:
        """Put the usable rows of ``path`` behind the others; returns how many. Nothing is added if one is bad. A row that is
        there already is counted, and is one task with the other. ``require`` raises ValueError for a task that the run
        cannot have, whose row is bad.

        Raises: ValueError, with the file, the place and what is wrong, for a bad row (unless they are skipped), for one that
        contradicts another, for a file that cannot be read, and when no row is left.
        """
        mark, reading = self._known.mark(), self._reading
        adding = _Adding(columns=Accounting(reading.roles) if reading.roles else None)
        try:
            said = time.monotonic()
            for number, (file, place, record) in enumerate(rows_of(path, reading.split)):
                if time.monotonic() - said > SAID_S:
                    said = time.monotonic()
                    log.info(READING, path=str(file), num_rows=number)
                try:
                    self._take(adding, record, RowPlace(file, place), require)
                except ValueError as error:
                    if reading.on_bad_row == "error":
                        raise ValueError(
                            f'{file}, {place}: {error}. Correct the row, or set on_bad_row = "skip" to leave such rows out'
                        ) from error
                    adding.num_bad += 1
                    log.warning("dataset_row_skipped", path=str(file), place=place, reason=str(error))
            if not adding.rows:
                raise ValueError(_nothing_left(path, adding, reading.kept_by))
        except (ValueError, OSError):
            self._known.back_to(mark)
            raise
        self._rows += adding.rows
        self._keys |= adding.keys
        self.num_repeated += adding.num_repeated
        if adding.layout:
            self.layouts.append(adding.layout)
        if adding.columns is not None:
            self.columns.append(adding.columns.use)
        log.info(
            "dataset_loaded", path=str(path), num_rows=len(adding.rows), num_skipped=adding.num_bad,
            num_filtered=adding.num_filtered, num_repeated=adding.num_repeated, layout=adding.layout or "",
        )  # fmt: skip
        return len(adding.rows)

    def _take(self, adding: _Adding, record: Any, where: RowPlace, require: Callable[[Task], object] | None) -> None:
        """Raises: ValueError for a row that cannot be used."""
        key = row_key(record)
        if key in adding.keys or key in self._keys:
            adding.num_repeated += 1
            return
        reading, here = self._reading, f"{where.file}, {where.place}"
        mapping = as_mapping(record)
        layout = reading.layout(mapping)
        if adding.layout is None:
            adding.layout, adding.laid_out_at = layout, here
        elif layout != adding.layout:
            raise ValueError(
                f"it is laid out as {layout}, and the row at {adding.laid_out_at} as {adding.layout}: put the two into "
                "sources of their own, or name the columns in the options"
            )
        if adding.columns is not None:
            adding.columns.take(mapping)
        found = reading.task(mapping, where)
        if found is None or not reading.filter.keeps(mapping, found[1]):
            adding.num_filtered += 1
            return
        task, question = found[0], None
        if require is not None:
            require(task)
        if reading.same_answer is not None:
            task, question = self._known.agreed(task, reading.same_answer)
        content = digest_of(reading.content(task))
        identity = identity_of(mapping, content, reading.id_column)
        if self._known.is_new(identity, content, question, here):
            adding.rows.append(IdentifiedTask(identity, task))
        else:
            adding.num_repeated += 1
        if key is not None:
            adding.keys.add(key)


def _nothing_left(path: Path, adding: _Adding, kept_by: str) -> str:
    counts = [f"{adding.num_bad} skipped"]
    if adding.num_filtered:
        counts.append(f"{adding.num_filtered} outside {kept_by}")
    if adding.num_repeated:
        counts.append(f"{adding.num_repeated} there already")
    return f"{path} has no usable row ({', '.join(counts)})"


def mixed_tasks(sources: Sequence[SourceOptions], reading: TaskReading) -> MixedTasks:
    """The tasks of ``sources``. Raises: ValueError as ``MixedTasks.add``, and for two sources of one name."""
    tasks = MixedTasks(reading)
    parts: list[TaskSourcePart] = []
    for source in sources:
        if any(source.label == part.name for part in parts):
            raise ValueError(f'two sources are called "{source.label}": give one of them another name')
        parts.append(TaskSourcePart(source.label, source.weight, tasks.add(expanded(source.path))))
    tasks.parts = tuple(parts)
    return tasks


class SplitOptions(Protocol):
    """What every environment with files has among its options."""

    @property
    def train_path(self) -> str: ...
    @property
    def eval_path(self) -> str: ...
    @property
    def sources(self) -> tuple[SourceOptions, ...]: ...


def tasks_of_split(whose: str, split: Split, options: SplitOptions, reading: TaskReading) -> MixedTasks:
    """The tasks of a split; filters are for training alone. Raises: ValueError as ``mixed_tasks``, and without a file."""
    reading = reading._replace(split=split)
    if split == "train" and options.sources:
        if options.train_path:
            raise ValueError("there are sources and train_path, which name the same thing: put train_path among the sources")
        return mixed_tasks(options.sources, reading)
    path = options.train_path if split == "train" else options.eval_path
    if not path:
        also = ", or several sources" if split == "train" else ""
        raise ValueError(f"the {whose} needs {split}_path for its {split} split: name a file ({EXPECTED}){also}")
    if split == "eval":
        reading = reading._replace(filter=RowFilter())
    return mixed_tasks([SourceOptions(path=path)], reading)
