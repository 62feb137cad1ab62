"""Rows of a file, of several, or of a folder, one after another, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gspo.tasks.environments import Split
from gspo_services.tasks.environments.sources.shards import files_of, format_of
from gspo_services.tasks.environments.sources.table_rows import arrow_rows, parquet_rows
from gspo_services.tasks.environments.sources.text_rows import FoundRow, csv_rows, json_rows, jsonl_rows

_READERS: Final[Mapping[str, Callable[[Path], Iterator[FoundRow]]]] = MappingProxyType(
    {
        "jsonl": jsonl_rows, "json": json_rows, "csv": csv_rows, "tsv": partial(csv_rows, delimiter="\t"),
        "parquet": parquet_rows, "arrow": arrow_rows,
    }
)  # fmt: skip


def rows_of(path: Path, split: Split = "train") -> Iterator[FoundRow]:
    """All rows of ``path``, of a folder those of the split.

    Raises: ValueError that names the file for what is missing, damaged or of another kind; OSError.
    """
    for file in files_of(path, split):
        yield from _READERS[format_of(file) or ""](file)


def row_at(path: Path, number: int) -> dict[str, Any]:
    """The row whose place in the file ends with ``number``. Raises: ValueError, also for one that there is not."""
    for _, place, record in rows_of(path):
        if place.rpartition(" ")[2] == str(number):
            return as_mapping(record)
    raise ValueError(f"{path} has no row {number}")


def as_mapping(record: Any) -> dict[str, Any]:
    """The row in ``record``, a line of JSON or a mapping; a list of messages is a row that holds nothing else.

    Raises: ValueError with what is wrong.
    """
    if isinstance(record, ValueError):
        raise record
    if isinstance(record, bytes):
        try:
            record = msgspec.json.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
    if isinstance(record, list) and record and all(isinstance(each, dict) for each in record):
        # Open-Reasoner-Zero publishes its rows so.
        return {"conversations": record}
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, found {type(record).__name__}")
    return record
