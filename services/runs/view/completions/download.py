"""Completions as a file, made while it is sent: Parquet, or one JSON object a line."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final, Protocol

INTEGERS: Final = ("id", "group_id", "batch", "task_index", "tokens", "length", "turns")
NUMBERS: Final = ("version", "lag", "reward", "clipped")
TEXTS: Final = ("source", "group_status", "status", "finish", "prompt", "answer", "expected", "damage")
NAMES: Final = {"id": "trajectory", "group_id": "group", "task_index": "task", "source": "tasks"}
"""What columns are called in the file, if otherwise than on the page."""
FORMS: Final = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}


class Encoder(Protocol):
    """Makes bytes of rows."""

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """The bytes of some rows."""

    def end(self) -> bytes:
        """The bytes behind the last row."""


def encoder(form: str, components: Sequence[str]) -> Encoder:
    """``form``: one of FORMS. ``components``: of the reward; each gets a column "component/NAME"."""
    return _Parquet(components) if form == "parquet" else _Lines(components)


class _Lines:
    def __init__(self, components: Sequence[str]) -> None:
        self._components = components

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        found = (json.dumps(_flat(row, self._components), ensure_ascii=True) + "\n" for row in rows)
        return "".join(found).encode()

    def end(self) -> bytes:
        return b""


class _Parquet:
    def __init__(self, components: Sequence[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._components = components
        kinds = {name: pyarrow.int64() for name in INTEGERS} | {name: pyarrow.float64() for name in NUMBERS}
        kinds |= {name: pyarrow.string() for name in TEXTS}
        fields = [pyarrow.field(NAMES.get(name, name), kind) for name, kind in kinds.items()]
        fields += [pyarrow.field(f"component/{name}", pyarrow.float64()) for name in components]
        self._table = pyarrow.Table
        self._schema = pyarrow.schema(fields)
        self._sink = BytesIO()
        self._writer = pyarrow.parquet.ParquetWriter(_Forgetful(self._sink), self._schema, compression="zstd")

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        flat = [_flat(row, self._components) for row in rows]
        if flat:
            self._writer.write_table(self._table.from_pylist(flat, schema=self._schema))
        return self._taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._taken()

    def _taken(self) -> bytes:
        found = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return found


class _Forgetful:
    """A file that counts what was written, while its bytes go elsewhere."""

    closed = False

    def __init__(self, sink: BytesIO) -> None:
        self._sink = sink
        self._place = 0

    def write(self, data: bytes) -> int:
        self._place += len(data)
        return self._sink.write(data)

    def tell(self) -> int:
        return self._place

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def _flat(row: Mapping[str, Any], components: Sequence[str]) -> dict[str, Any]:
    """One row with a column for each component. Halves of characters, which no encoding has, are written out."""
    plain = {NAMES.get(name, name): _number(row.get(name)) for name in (*INTEGERS, *NUMBERS)}
    for name in TEXTS:
        text = row.get(name)
        plain[NAMES.get(name, name)] = None if text is None else str(text).encode("utf-8", "backslashreplace").decode()
    known = row.get("components") or {}
    return plain | {f"component/{name}": _number(known.get(name)) for name in components}


def _number(value: Any) -> Any:
    """A number; None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
