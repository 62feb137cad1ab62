"""Rows of a file or a folder, one after another, each with its place.

A folder is a Hugging Face dataset as ``save_to_disk`` writes it (state.json names its Arrow files, in the stream format), or
holds shards: *.parquet or *.jsonl, read in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    import pyarrow

SUFFIXES: Final = (".jsonl", ".parquet")
STATE: Final = "state.json"
SPLITS: Final = "dataset_dict.json"
ROWS_AT_ONCE: Final = 1024


class FoundRow(NamedTuple):
    """A row as it stands in a file: a line of JSON, not yet decoded, or a mapping."""

    path: Path
    place: str
    """Such as "line 3"."""
    record: Any


class _State(msgspec.Struct):
    """state.json, as far as it is read."""

    data_files: list[dict[str, Any]] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


def rows_of(path: Path) -> Iterator[FoundRow]:
    """All rows of ``path``. Raises: ValueError that names the file for what is missing, damaged or of another kind."""
    if path.is_dir():
        for part in _parts_of(path):
            yield from rows_of(part) if part.suffix in SUFFIXES else _arrow_rows(part)
        return
    if not path.is_file():
        raise ValueError(f"there is no file {path.absolute()}: correct train_path or eval_path in environment.options")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield FoundRow(path, f"line {number}", line)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise ValueError(
            f"{path} is neither .jsonl nor .parquet, nor a folder with such files or with a dataset that Hugging Face's "
            "save_to_disk wrote"
        )


def _parts_of(folder: Path) -> list[Path]:
    """The files of a folder, in their order. Raises: ValueError."""
    if (folder / STATE).is_file():
        try:
            names = [
                str(each["filename"]) for each in msgspec.json.decode((folder / STATE).read_bytes(), type=_State).data_files
            ]
        except (msgspec.MsgspecError, KeyError) as error:
            raise ValueError(f"{folder / STATE} is not what save_to_disk writes: {error}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder / STATE} names {missing[0]}, which is not there: copy the whole folder")
        return [folder / name for name in names]
    if (folder / SPLITS).is_file():
        try:
            splits = msgspec.json.decode((folder / SPLITS).read_bytes(), type=_Splits).splits
        except msgspec.MsgspecError as error:
            raise ValueError(f"{folder / SPLITS} is not what save_to_disk writes: {error}") from error
        named = " or ".join(str(folder / split) for split in splits)
        raise ValueError(f"{folder} holds several splits: name one of them, {named}")
    for suffix in SUFFIXES:
        shards = sorted(each for each in folder.iterdir() if each.suffix == suffix and not each.name.startswith("."))
        if shards:
            return shards
    raise ValueError(f"the folder {folder} holds neither *.parquet nor *.jsonl, nor the {STATE} of a saved dataset")


def _parquet_rows(path: Path) -> Iterator[FoundRow]:
    # Only Parquet and Arrow need these tens of megabytes.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _batched(path, file.iter_batches(batch_size=ROWS_AT_ONCE))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _arrow_rows(path: Path) -> Iterator[FoundRow]:
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield from _batched(path, stream)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a whole Arrow file: {error}") from error


def _batched(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[FoundRow]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield FoundRow(path, f"row {number}", record)
