"""A row of programs as every layout is read into, and checks that the layouts share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

import msgspec

from gspo.tasks.environments import ChatMessage
from gspo_services.tasks.environments.programs import CheckerProgram, OwnerName, ProgramTest


class ProgramRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says of one problem."""

    statement: str
    """The question; "" where ``messages`` ask it."""
    tests: list[ProgramTest]
    messages: list[ChatMessage] = []
    """The question as the set's owners ask it, with nothing of ours before it."""
    num_generated: int = 0
    """More tests, in a file of their own (open-r1/codeforces), which is found by ``name``."""
    is_incomplete: bool = False
    """Without those a wrong program may pass."""
    owner: OwnerName = ""
    """Whose rules programs are run and compared by."""
    language: str = ""
    """The one that is asked for; "" for any that the environment allows."""
    starter_code: str = ""
    function: str = ""
    """What is called; "" for a program that reads and prints."""
    checker: CheckerProgram | None = None
    time_limit_s: float | None = None
    memory_bytes: int | None = None
    total_s: float | None = None
    solution: str = ""
    solution_language: str = "python"
    name: str = ""
    rating: int | None = None
    """How hard it is, as Elo ratings go."""
    difficulty: str = ""
    date: date | None = None
    """When it was published."""


def total_of(test_s: float, num_tests: int) -> float:
    """Seconds for all tests, where the owners of a set limit each of them only: one more for each, and five."""
    return (test_s + 1) * num_tests + 5


def column(record: Mapping[str, Any], name: str) -> Any:
    """The value in a column. Raises: ValueError that names the columns there are."""
    if name not in record:
        raise ValueError(f'no column "{name}": there are {", ".join(sorted(map(str, record)))[:300]}')
    return record[name]


def text_in(record: Mapping[str, Any], name: str, *, needed: bool = True) -> str:
    """The text in a column; "" for one that is not there, if it is not needed. Raises: ValueError."""
    value = column(record, name) if needed else record.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value.strip()):
        raise ValueError(f'column "{name}" is {repr(value)[:100]}, not text')
    return value


def json_in(record: Mapping[str, Any], name: str) -> Any:
    """What the JSON in a text column says; a column that is a list or a map already stays as it is. Raises: ValueError."""
    value = column(record, name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'column "{name}" is not JSON ({error})') from error


def number_in(record: Mapping[str, Any], name: str) -> float | None:
    """The number in a column; None for one that is empty or not there. Raises: ValueError."""
    value = record.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f'column "{name}" is {repr(value)[:100]}, not a number')
    return float(value)


def positive_in(record: Mapping[str, Any], name: str) -> float | None:
    """A number above 0, likewise. Raises: ValueError."""
    value = number_in(record, name)
    if value is not None and value <= 0:
        raise ValueError(f'column "{name}" is {value:g}: expected a number above 0')
    return value


def rating_in(record: Mapping[str, Any], name: str) -> int | None:
    """A rating, likewise. Raises: ValueError."""
    value = number_in(record, name)
    return None if value is None else round(value)


def date_in(record: Mapping[str, Any], name: str) -> date | None:
    """The day in a column: a date, or text that begins with one as 2024-01-31. Raises: ValueError."""
    value = record.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError as error:
        raise ValueError(f'column "{name}" is {str(value)[:50]!r}, not a date such as 2024-01-31') from error


def read_tests(found: Any, name: str, *, public: bool = False) -> list[ProgramTest]:
    """Tests from maps with "input" and "output". Raises: ValueError that names the column and the test."""
    if not isinstance(found, list):
        raise ValueError(f'column "{name}" is {type(found).__name__}, not a list of tests')
    tests = []
    for number, test in enumerate(found, start=1):
        if not isinstance(test, dict) or "input" not in test or "output" not in test:
            raise ValueError(
                f'column "{name}", test {number} is {repr(test)[:100]}: expected {{"input": ..., "output": ...}}'
            )
        said = (test["input"], test["output"])
        if not all(isinstance(part, str) for part in said):
            raise ValueError(f'column "{name}", test {number}: input and output must be text')
        tests.append(ProgramTest(input=said[0], output=said[1], public=public or test.get("public") is True))
    return tests
