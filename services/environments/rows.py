"""Rows of a JSONL or Parquet file as tasks, for agents: the function that plays an episode gets the row as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import structlog

from gspo.agents import require_plain_result
from gspo.environments import Split, Task, TaskSet, TaskSource
from protocol import limits
from protocol.messages.base import require_plain

log = structlog.get_logger(__name__)

Row = TypeVar("Row")
OnBadRow = Literal["error", "skip"]
"""A row that cannot be used stops the run, or is counted and left out."""


class RowsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the tasks."""

    train_path: str = ""
    """File of the training split, *.jsonl or *.parquet; "" when there is none."""
    eval_path: str = ""
    """File of the held-out split, likewise."""
    on_bad_row: OnBadRow = "error"
    """A row that cannot be a task stops the run, or is counted and left out."""


class Rows(TaskSet):
    """Each row of a JSONL or Parquet file is a task, whatever its columns; an agent plays it."""

    options_type = RowsOptions

    def __init__(self, options: RowsOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> TaskSource:
        """The rows of the split's file, in its order. Raises: ValueError that names the file and line of a bad row."""
        path = self._options.train_path if split == "train" else self._options.eval_path
        if not path:
            name = f"{split}_path"
            raise ValueError(f"the rows task set needs {name} for its {split} split: name a .jsonl or .parquet file")
        return PlainRows(usable_rows(Path(path), plain_task, self._options.on_bad_row))


class PlainRows:
    """A ``TaskSource`` over rows in memory."""

    def __init__(self, rows: list[Task]) -> None:
        self._rows = rows

    @property
    def num_tasks(self) -> int:
        """How many usable rows there are."""
        return len(self._rows)

    def task(self, index: int) -> Task:
        """Row ``index``. Raises: IndexError outside 0 .. num_tasks - 1."""
        if not 0 <= index < len(self._rows):
            raise IndexError(f"task {index} does not exist: there are {len(self._rows)}")
        return self._rows[index]


def usable_rows(path: Path, read: Callable[[dict[str, Any]], Row], on_bad_row: OnBadRow) -> list[Row]:
    """What ``read`` makes of each row of ``path``; it raises ValueError for a row that cannot be used.

    Raises: ValueError, with the file, the line and what is wrong, for a bad row (unless they are skipped), for a file that
    cannot be read or is of another kind, and when no row is left.
    """
    rows: list[Row] = []
    num_skipped = 0
    for place, record in _records(path):
        try:
            rows.append(read(_mapping(record)))
        except ValueError as error:
            if on_bad_row == "error":
                raise ValueError(
                    f'{path}, {place}: {error}. Correct the row, or set on_bad_row = "skip" to leave such rows out'
                ) from error
            num_skipped += 1
            log.warning("dataset_row_skipped", path=str(path), place=place, reason=str(error))
    if not rows:
        raise ValueError(f"{path} has no usable row ({num_skipped} skipped)")
    log.info("dataset_loaded", path=str(path), num_rows=len(rows), num_skipped=num_skipped)
    return rows


def plain_task(row: dict[str, Any]) -> Task:
    """The row as a task that the broker can lease and a worker can be sent. Raises: ValueError with what is wrong."""
    for column, value in row.items():
        try:
            require_plain_result(f'column "{column[:100]}"', value)
        except TypeError as error:
            raise ValueError(str(error)) from error
    require_plain("the row", row, limits.MAX_TASK_BYTES)
    return row


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row with its place: a line of JSON, not yet decoded, or a mapping."""
    if not path.is_file():
        raise ValueError(f"there is no file {path.absolute()}: correct train_path or eval_path in environment.options")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", line
    elif path.suffix == ".parquet":
        yield from _parquet_records(path)
    else:
        raise ValueError(f"{path} is neither .jsonl nor .parquet")


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    # Only Parquet needs these tens of megabytes.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    for number, record in enumerate(table.to_pylist(), start=1):
        yield f"row {number}", record


def _mapping(record: Any) -> dict[str, Any]:
    """The row in ``record``, a line of JSON or a mapping. Raises: ValueError with what is wrong."""
    if isinstance(record, bytes):
        try:
            record = msgspec.json.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, found {type(record).__name__}")
    return record
