"""Several sources of tasks with weights, read once, with tasks added to them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import structlog

from gspo.tasks.environments import Split, Task
from gspo_services.tasks.environments.sources.files import rows_of
from gspo_services.tasks.environments.sources.filters import RowFilter
from gspo_services.tasks.environments.sources.identity import IdentifiedTask, Identities, identity_of

log = structlog.get_logger(__name__)

OnBadRow = Literal["error", "skip"]
"""A row that cannot be used stops the run, or is counted and left out."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of training tasks."""

    path: str
    """A .jsonl or .parquet file, a folder with shards, or a dataset saved by Hugging Face's save_to_disk."""
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
        return self.name or Path(self.path).stem


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


class MixedTasks:
    """A ``TaskSource`` over the tasks of one or more sources, one source after another."""

    def __init__(self, reading: TaskReading) -> None:
        self._reading = reading
        self._rows: list[IdentifiedTask] = []
        self._identities = Identities()
        self.parts: tuple[TaskSourcePart, ...] = ()
        """The sources as they were read at the start."""

    @property
    def num_tasks(self) -> int:
        """How many usable rows there are."""
        return len(self._rows)

    @property
    def digest(self) -> str:
        """Of the identities of all tasks, in their order."""
        return self._identities.digest()

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

    def add(self, path: Path) -> int:
        """Put the usable rows of ``path`` behind the others; returns how many. Nothing is added if one is bad.

        Raises: ValueError, with the file, the place and what is wrong, for a bad row (unless they are skipped), for a task
        that is there already, for a file that cannot be read, and when no row is left.
        """
        rows: list[IdentifiedTask] = []
        num_bad = num_filtered = 0
        reading = self._reading
        try:
            for file, place, record in rows_of(path):
                try:
                    mapping = as_mapping(record)
                    found = reading.task(mapping, RowPlace(file, place))
                    if found is None or not reading.filter.keeps(mapping, found[1]):
                        num_filtered += 1
                        continue
                    task = found[0]
                    identity = identity_of(mapping, reading.content(task), reading.id_column)
                    self._identities.require_new(identity, f"{file}, {place}")
                except ValueError as error:
                    if reading.on_bad_row == "error":
                        raise ValueError(
                            f'{file}, {place}: {error}. Correct the row, or set on_bad_row = "skip" to leave such rows out'
                        ) from error
                    num_bad += 1
                    log.warning("dataset_row_skipped", path=str(file), place=place, reason=str(error))
                    continue
                rows.append(IdentifiedTask(identity, task))
            if not rows:
                filtered = f", {num_filtered} outside {reading.kept_by}" if num_filtered else ""
                raise ValueError(f"{path} has no usable row ({num_bad} skipped{filtered})")
        except ValueError:
            self._identities.forget([row.identity for row in rows])
            raise
        self._rows += rows
        counts = {"num_rows": len(rows), "num_skipped": num_bad, "num_filtered": num_filtered}
        log.info("dataset_loaded", path=str(path), **counts)
        return len(rows)


def mixed_tasks(sources: Sequence[SourceOptions], reading: TaskReading) -> MixedTasks:
    """The tasks of ``sources``. Raises: ValueError as ``MixedTasks.add``, and for two sources of one name."""
    tasks = MixedTasks(reading)
    parts: list[TaskSourcePart] = []
    for source in sources:
        if any(source.label == part.name for part in parts):
            raise ValueError(f'two sources are called "{source.label}": give one of them another name')
        parts.append(TaskSourcePart(source.label, source.weight, tasks.add(Path(source.path))))
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
    if split == "train" and options.sources:
        if options.train_path:
            raise ValueError("there are sources and train_path, which name the same thing: put train_path among the sources")
        return mixed_tasks(options.sources, reading)
    path = options.train_path if split == "train" else options.eval_path
    if not path:
        also = ", or several sources" if split == "train" else ""
        raise ValueError(
            f"the {whose} needs {split}_path for its {split} split: name a .jsonl or .parquet file or a folder{also}"
        )
    if split == "eval":
        reading = reading._replace(filter=RowFilter())
    return mixed_tasks([SourceOptions(path=path)], reading)


def as_mapping(record: Any) -> dict[str, Any]:
    """The row in ``record``, a line of JSON or a mapping. Raises: ValueError with what is wrong."""
    if isinstance(record, bytes):
        try:
            record = msgspec.json.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, found {type(record).__name__}")
    return record
