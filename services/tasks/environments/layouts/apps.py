"""Rows of APPS and TACO.

Columns as in hendrycks/apps and FlagOpen/TACO: question, input_output (see input_output.py), solutions (JSON list of
programs), starter_code, difficulty; TACO adds name and date. Both runners give each test four seconds and any memory; TACO's
columns time_limit and memory_limit are those of the sites, and its runner does not read them
(hendrycks/apps: eval/testing_util.py; FlagOpen/TACO: metrics/testing_util.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.input_output import input_output_tests
from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    date_in,
    json_in,
    text_in,
    total_of,
)

APPS_COLUMNS: Final = frozenset({"question", "input_output"})
TEST_S: Final = 4.0


def apps_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    if column(record, "input_output") in (None, "", {}):
        raise ValueError('column "input_output" is empty, so that no program could be scored (some rows of APPS are so)')
    tests, function = input_output_tests(json_in(record, "input_output"), "input_output")
    return ProgramRow(
        statement=text_in(record, "question"),
        tests=tests,
        starter_code=text_in(record, "starter_code", needed=False),
        function=function,
        owner="prime",
        time_limit_s=TEST_S,
        total_s=total_of(TEST_S, len(tests)),
        solution=_solution(record),
        name=str(record.get("name") or record.get("problem_id") or ""),
        difficulty=text_in(record, "difficulty", needed=False),
        date=date_in(record, "date"),
    )


def _solution(record: Mapping[str, Any]) -> str:
    """The first of its solutions; "" where there are none, as in most rows for tests."""
    if not record.get("solutions"):
        return ""
    solutions = json_in(record, "solutions")
    if not isinstance(solutions, list) or not all(isinstance(solution, str) for solution in solutions):
        raise ValueError('column "solutions" is not a list of programs')
    return solutions[0] if solutions else ""
