"""The layout of rows that are written for this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    date_in,
    json_in,
    positive_in,
    rating_in,
    read_tests,
    text_in,
)
from gspo_services.tasks.environments.programs import CheckerProgram

OWN_COLUMNS = frozenset({"prompt", "tests"})
"""What tells the layout; more are read: function, starter_code, solution, solution_language, checker, time_limit_s,
memory_bytes, name, rating, difficulty, date."""


def own_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with what is wrong."""
    memory = positive_in(record, "memory_bytes")
    return ProgramRow(
        statement=text_in(record, "prompt"),
        tests=read_tests(json_in(record, "tests"), "tests"),
        starter_code=text_in(record, "starter_code", needed=False),
        function=text_in(record, "function", needed=False),
        checker=_checker(record),
        time_limit_s=positive_in(record, "time_limit_s"),
        memory_bytes=None if memory is None else int(memory),
        solution=text_in(record, "solution", needed=False),
        solution_language=text_in(record, "solution_language", needed=False) or "python",
        name=text_in(record, "name", needed=False),
        rating=rating_in(record, "rating"),
        difficulty=text_in(record, "difficulty", needed=False),
        date=date_in(record, "date"),
    )


def _checker(record: Mapping[str, Any]) -> CheckerProgram | None:
    if record.get("checker") is None:
        return None
    try:
        return msgspec.convert(column(record, "checker"), CheckerProgram)
    except msgspec.ValidationError as error:
        raise ValueError(
            f'column "checker": {error}; expected {{"source": ..., "language": "cpp", "kind": "testlib"}}, where '
            'kind may also be "prints"'
        ) from error
