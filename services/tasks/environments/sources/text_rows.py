"""Rows of text files: JSON Lines, JSON, and CSV."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from gspo_services.tasks.environments.sources.packing import open_text

MAX_JSON_BYTES: Final = 2 << 30
MAX_FIELD_CHARS: Final = 16 << 20
"""Of a CSV field: a quote that is never closed takes in the rest of the file."""
_SURROGATE: Final = 0xDC00


class FoundRow(NamedTuple):
    """A row as it stands in a file."""

    path: Path
    place: str
    """Such as "line 3"."""
    record: Any
    """JSON that is not decoded yet, or a mapping; a ValueError for a row that cannot be read, while those behind it can."""


class _Wrapped(msgspec.Struct):
    data: list[msgspec.Raw]


def jsonl_rows(path: Path) -> Iterator[FoundRow]:
    """One JSON value a line. Raises: ValueError, OSError."""
    with open_text(path) as file:
        yield from _json_lines(path, file.lines())


def json_rows(path: Path) -> Iterator[FoundRow]:
    """An array of rows, {"data": [...]}, or one row a line, as all three are published. Raises: ValueError, OSError."""
    with open_text(path) as file:
        lines = file.lines()
        head: list[bytes] = []
        for line in lines:
            head.append(line)
            if line.strip():
                break
        if head and _is_row(head[-1]):
            yield from _json_lines(path, itertools.chain(head, lines))
            return
        content = b"".join(head) + file.whole(MAX_JSON_BYTES)
    for number, raw in enumerate(_array(path, content), start=1):
        yield FoundRow(path, f"row {number}", bytes(raw))


def csv_rows(path: Path, delimiter: str = ",") -> Iterator[FoundRow]:
    """Rows of text below a line of names. Raises: ValueError, OSError."""
    with open_text(path) as file:
        csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD_CHARS))
        text = (line.decode("utf-8", "surrogateescape") for line in file.lines())
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header, shown = None, ""
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                raise ValueError(
                    f"{path}, line {line}: not CSV ({error}): quote a field with a comma, a quote or a line break, and "
                    "double the quotes inside"
                ) from error
            if header is None:
                header = _header(path, fields)
                shown = ", ".join(header)[:300]  # Once: there may be as many bad rows as columns.
            elif fields:
                yield FoundRow(path, f"line {line}", _record(header, fields, shown))
        if header is None:
            raise ValueError(f"{path} is empty: expected a line with the names of the columns, and rows")


def _json_lines(path: Path, lines: Iterator[bytes]) -> Iterator[FoundRow]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield FoundRow(path, f"line {number}", line)


def _is_row(line: bytes) -> bool:
    """Whether the line is a whole object that holds no list of rows."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return not isinstance(value.get("data"), list)


def _array(path: Path, content: bytes) -> list[msgspec.Raw]:
    """The rows of a JSON file. Raises: ValueError that names the line of a mistake."""
    is_object = content[:4096].lstrip().startswith(b"{")
    try:
        if is_object:
            return msgspec.json.decode(content, type=_Wrapped).data
        return msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise ValueError(
            f'{path} holds no rows ({error}): expected an array of them, {{"data": [...]}}, or one row a line'
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}): correct it, or end its name with .jsonl for one row a line"
        ) from error


def _header(path: Path, fields: list[str]) -> list[str]:
    """The names of the columns. Raises: ValueError."""
    names = [name.strip() for name in fields]
    number = Counter(names)
    twice = next((name for name in names if number[name] > 1), None)
    if twice is not None:
        raise ValueError(f'{path}: two columns are called "{twice[:100]}": rename one in its first line')
    if (fault := _not_utf8(names)) is not None:
        raise ValueError(f"{path}, line 1: {fault}")
    return names


def _record(header: Sequence[str], fields: Sequence[str], shown: str) -> dict[str, str] | ValueError:
    if len(fields) != len(header):
        return ValueError(
            f"it has {len(fields)} fields, and the first line names {len(header)} ({shown}): quote a field that holds a "
            "comma"
        )
    fault = _not_utf8(fields)
    return dict(zip(header, fields, strict=True)) if fault is None else ValueError(fault)


def _not_utf8(fields: Sequence[str]) -> str | None:
    for field in fields:
        try:
            field.encode()
        except UnicodeEncodeError as error:
            byte = ord(field[error.start]) - _SURROGATE
            return f"byte 0x{byte:02x} is not UTF-8 (a file of Latin-1 or Windows?): save it as UTF-8"
    return None
