"""Rows of Parquet and Arrow files, a batch of them in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gspo_services.tasks.environments.sources.packing import require_no_pointer
from gspo_services.tasks.environments.sources.text_rows import FoundRow

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE: Final = 1024
CELLS_AT_ONCE: Final = 1 << 18
"""Each becomes an object of Python: some tens of megabytes, however many columns there are."""


def parquet_rows(path: Path) -> Iterator[FoundRow]:
    """Raises: ValueError that names the file when it is none, or is damaged."""
    # Only Parquet and Arrow need these tens of megabytes.
    import pyarrow
    import pyarrow.parquet

    _require_no_pointer(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _batched(path, file.iter_batches(batch_size=_rows_at_once(len(file.schema.names))))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def arrow_rows(path: Path) -> Iterator[FoundRow]:
    """Of Arrow's stream format, as Hugging Face's ``datasets`` writes it. Raises: ValueError, likewise."""
    import pyarrow

    _require_no_pointer(path)
    try:
        with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield from _batched(path, stream)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Arrow file: {error}") from error


def _batched(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[FoundRow]:
    number = 0
    for batch in batches:
        step = _rows_at_once(batch.num_columns)
        narrow = [field.name for field in batch.schema if str(field.type) in ("halffloat", "float")]
        for start in range(0, batch.num_rows, step):
            for record in batch.slice(start, step).to_pylist():
                number += 1
                for name in narrow:
                    record[name] = _shortest(record[name])
                yield FoundRow(path, f"row {number}", record)


def _shortest(value: float | None) -> float | None:
    """A float32 as it is written: 0.1, and not the float64 that is nearest to it, 0.10000000149011612."""
    import numpy

    return None if value is None else float(str(numpy.float32(value)))


def _rows_at_once(num_columns: int) -> int:
    return max(1, min(ROWS_AT_ONCE, CELLS_AT_ONCE // max(1, num_columns)))


def _require_no_pointer(path: Path) -> None:
    with path.open("rb") as file:
        require_no_pointer(path, file.read(64))
