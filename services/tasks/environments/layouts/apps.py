"""Rows of APPS and TACO.

Columns as in hendrycks/apps and FlagOpen/TACO: question, input_output (JSON with inputs, outputs and, where a function is
called, fn_name), solutions (JSON list of programs), starter_code, difficulty; TACO adds name, time_limit ("2.0 seconds"),
memory_limit ("256.0 megabytes") and date. Inputs of a program are texts or lists of lines. Inputs of a function are lists of
arguments; the expected result may be wrapped in a list (hendrycks/apps: eval/testing_util.py, run_test; FlagOpen/TACO:
metrics/testing_util.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.program_rows import ProgramRow, column, date_in, json_in, text_in
from gspo_services.tasks.environments.programs import ProgramTest

APPS_COLUMNS: Final = frozenset({"question", "input_output"})
_LIMIT: Final = re.compile(r"([\d.]+)\s*(seconds?|s|milliseconds?|ms|bytes|kilobytes|megabytes|gigabytes|kb|mb|gb)")
_UNITS: Final = {
    "second": 1.0, "s": 1.0, "millisecond": 1e-3, "ms": 1e-3,
    "byte": 1, "kilobyte": 1 << 10, "kb": 1 << 10, "megabyte": 1 << 20, "mb": 1 << 20, "gigabyte": 1 << 30, "gb": 1 << 30,
}  # fmt: skip


def apps_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    if column(record, "input_output") in (None, "", {}):
        raise ValueError('column "input_output" is empty, so that no program could be scored (some rows of APPS are so)')
    found = json_in(record, "input_output")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in ("inputs", "outputs")):
        raise ValueError('column "input_output" has no lists "inputs" and "outputs"')
    inputs, outputs, function = found["inputs"], found["outputs"], str(found.get("fn_name") or "")
    if len(inputs) != len(outputs):
        raise ValueError(f'column "input_output" has {len(inputs)} inputs and {len(outputs)} outputs')
    test = _call if function else _run
    memory = _limit(record, "memory_limit")
    return ProgramRow(
        statement=text_in(record, "question"),
        tests=[test(number, *pair) for number, pair in enumerate(zip(inputs, outputs, strict=True), start=1)],
        starter_code=text_in(record, "starter_code", needed=False),
        function=function,
        time_limit_s=_limit(record, "time_limit"),
        memory_bytes=None if memory is None else int(memory),
        solution=_solution(record),
        name=str(record.get("name") or record.get("problem_id") or ""),
        difficulty=text_in(record, "difficulty", needed=False),
        date=date_in(record, "date"),
    )


def _run(number: int, given: Any, said: Any) -> ProgramTest:
    return ProgramTest(input=_text(number, given), output=_text(number, said))


def _text(number: int, value: Any) -> str:
    """A text, or a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, (str, int, float)) for line in value):
        return "\n".join(map(str, value))
    raise ValueError(f'column "input_output", test {number}: {repr(value)[:100]} is neither text nor a list of lines')


def _call(number: int, given: Any, result: Any) -> ProgramTest:
    if not isinstance(given, list):
        raise ValueError(f'column "input_output", test {number}: {repr(given)[:100]} is not a list of arguments')
    return ProgramTest(input="\n".join(map(json.dumps, given)), output=json.dumps(result), or_first=True)


def _solution(record: Mapping[str, Any]) -> str:
    """The first of its solutions; "" where there are none, as in most rows for tests."""
    if not record.get("solutions"):
        return ""
    solutions = json_in(record, "solutions")
    if not isinstance(solutions, list) or not all(isinstance(solution, str) for solution in solutions):
        raise ValueError('column "solutions" is not a list of programs')
    return solutions[0] if solutions else ""


def _limit(record: Mapping[str, Any], name: str) -> float | None:
    """The first amount in a column such as "2.0 seconds"; None for one that says nothing."""
    value = record.get(name)
    if value is None or value == "":
        return None
    found = _LIMIT.search(str(value).lower())
    if found is None:
        raise ValueError(
            f'column "{name}" is {str(value)[:50]!r}: expected an amount such as "2.0 seconds" or "256 megabytes"'
        )
    unit = found[2] if found[2] in _UNITS else found[2].removesuffix("s")
    return float(found[1]) * _UNITS[unit]
