"""Tests that are too large for a task, read again from the row that has them."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from gspo_services.tasks.environments.layouts.codeforces import with_unix_lines
from gspo_services.tasks.environments.layouts.recognition import LayoutName, program_row
from gspo_services.tasks.environments.programs import (
    FiledTests,
    GeneratedTests,
    ProgramTest,
    TestsElsewhere,
    digest_of,
)
from gspo_services.tasks.environments.sources import UTF8_MARK, row_at

KEPT_BYTES: Final = 256 << 20
"""Of tests that are kept for the next program; those that were asked for last."""


class KeptRows:
    """Reads tests out of files, from any thread; it remembers where lines begin, and the tests that are asked for often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, int, int], array[int]] = {}
        self._kept: OrderedDict[str, tuple[list[ProgramTest], int]] = OrderedDict()

    def tests(self, asked: TestsElsewhere) -> list[ProgramTest]:
        """The tests of a row, or those that were generated for it.

        Raises: ValueError for a file that is not there or is damaged, and for a row that was changed.
        """
        key = asked.digest if isinstance(asked, FiledTests) else f"{asked.path}:{asked.problem}"
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept[0]
            tests = self._read(asked) if isinstance(asked, FiledTests) else _generated(asked)
            self._keep(key, tests)
            return tests

    def _read(self, asked: FiledTests) -> list[ProgramTest]:
        path = Path(asked.path)
        if asked.layout not in get_args(LayoutName):
            raise ValueError(f'there is no layout "{asked.layout}"')
        if not path.is_file():
            raise ValueError(
                f"there is no file {path.absolute()} where programs are scored: rollouts need it, too; mount it there"
            )
        read = {".jsonl": self._line, ".parquet": _parquet_row}.get(path.suffix, row_at)
        record = read(path, asked.row)
        tests = program_row(record, asked.layout).tests  # type: ignore[arg-type]
        if digest_of(tests) != asked.digest:
            raise ValueError(
                f"{path} has other tests in row {asked.row} than when the task was made: restart the run with it"
            )
        return tests

    def _line(self, path: Path, number: int) -> dict[str, Any]:
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        with path.open("rb") as file:
            if key not in self._lines:
                begins = array("q", [0])
                for line in file:
                    begins.append(begins[-1] + len(line))
                self._lines = {key: begins}
            begins = self._lines[key]
            if not 1 <= number < len(begins):
                raise ValueError(f"{path} has {len(begins) - 1} lines, and line {number} is asked for")
            file.seek(begins[number - 1])
            line = file.readline()
        try:
            return msgspec.json.decode(line.removeprefix(UTF8_MARK), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from error

    def _keep(self, key: str, tests: list[ProgramTest]) -> None:
        self._kept[key] = (tests, sum(len(test.input) + len(test.output) for test in tests))
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)


def _generated(asked: GeneratedTests) -> list[ProgramTest]:
    import pyarrow
    import pyarrow.parquet

    path = Path(asked.path)
    if not path.is_file():
        raise ValueError(
            f"there is no file {path.absolute()} where programs are scored: rollouts need it, too; mount it there"
        )
    try:
        table = pyarrow.parquet.read_table(
            path, columns=["input", "output"], filters=[("problem_id", "=", asked.problem)], partitioning=None
        )
        tests = [with_unix_lines(ProgramTest(**row)) for row in table.to_pylist()]
    except (pyarrow.ArrowException, OSError, TypeError) as error:
        raise ValueError(f"{path} is no Parquet file with the columns problem_id, input and output: {error}") from error
    if len(tests) < asked.num_tests:
        raise ValueError(
            f"{path} has {len(tests)} tests of problem {asked.problem}, and its row says {asked.num_tests}: fetch the file "
            "again"
        )
    return tests


def _parquet_row(path: Path, number: int) -> dict[str, Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    index = number - 1
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if 0 <= index < size:
            (record,) = file.read_row_group(group).slice(index, 1).to_pylist()
            return dict(record)
        index -= size
    raise ValueError(f"{path} has {file.metadata.num_rows} rows, and row {number} is asked for")
