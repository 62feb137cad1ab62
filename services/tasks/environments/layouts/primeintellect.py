"""Rows of PrimeIntellect/verifiable-coding-problems, and of open-r1's copy of it.

Columns: problem_statement or prompt, verification_info (JSON or a map with language and test_cases, see listed_tests.py),
gold_standard_solution, problem_id. Copies differ in whether maps are texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.apps import TEST_S
from gspo_services.tasks.environments.layouts.listed_tests import listed_tests
from gspo_services.tasks.environments.layouts.program_rows import ProgramRow, json_in, text_in, total_of

PRIMEINTELLECT_COLUMNS: Final = frozenset({"verification_info"})


def primeintellect_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    info = json_in(record, "verification_info")
    if not isinstance(info, Mapping) or "test_cases" not in info:
        raise ValueError(f'column "verification_info" is {repr(info)[:100]}: expected a map with "test_cases"')
    language = str(info.get("language") or "python")
    tests, function = listed_tests(info["test_cases"], "verification_info.test_cases")
    return ProgramRow(
        statement=text_in(record, "problem_statement" if "problem_statement" in record else "prompt"),
        tests=tests,
        function=function,
        owner="prime",
        language=language,
        time_limit_s=TEST_S,
        total_s=total_of(TEST_S, len(tests)),
        name=text_in(record, "problem_id", needed=False),
    )
