"""Rows of deepmind/code_contests.

Columns as in google-deepmind/code_contests: contest_problem.proto, which Hugging Face's copy keeps: name, description,
public_tests, private_tests and generated_tests (each {"input": [...], "output": [...]}), solutions ({"language": [...],
"solution": [...]}, where 3 is Python 3 and 2 is C++), time_limit ({"seconds", "nanos"}), memory_limit_bytes, cf_rating,
input_file and output_file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.input_output import input_output_tests
from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    positive_in,
    rating_in,
    text_in,
    total_of,
)
from gspo_services.tasks.environments.programs import ProgramTest

CODE_CONTESTS_COLUMNS: Final = frozenset({"description", "public_tests", "private_tests"})
_LANGUAGES: Final = {3: "python", 2: "cpp"}
DEFAULT_TEST_S: Final = 10.0
"""TestOptions of its tester, where a row has no limit."""


def code_contests_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    for name in ("input_file", "output_file"):
        if record.get(name):
            raise ValueError(f'column "{name}" is {record[name]!r}: only problems that read standard input can be run')
    tests = [
        *_tests(record, "public_tests", public=True),
        *_tests(record, "private_tests"),
        *(_tests(record, "generated_tests") if record.get("generated_tests") else []),
    ]
    test_s = _seconds(record)
    memory = positive_in(record, "memory_limit_bytes") if record.get("memory_limit_bytes") else None
    language, solution = _solution(record)
    rating = rating_in(record, "cf_rating")
    return ProgramRow(
        statement=_statement(record, test_s, memory),
        tests=tests,
        owner="code_contests",
        time_limit_s=test_s or DEFAULT_TEST_S,
        memory_bytes=None if memory is None else int(memory),
        total_s=total_of(test_s or DEFAULT_TEST_S, len(tests)),
        solution=solution,
        solution_language=language,
        name=text_in(record, "name", needed=False),
        # 0 is a problem without a rating.
        rating=rating or None,
    )


def _tests(record: Mapping[str, Any], name: str, *, public: bool = False) -> list[ProgramTest]:
    found = column(record, name)
    if not isinstance(found, Mapping):
        raise ValueError(f'column "{name}" is {repr(found)[:100]}: expected {{"input": [...], "output": [...]}}')
    tests = input_output_tests({"inputs": found.get("input"), "outputs": found.get("output")}, name).tests
    return [ProgramTest(input=test.input, output=test.output, public=public) for test in tests]


def _seconds(record: Mapping[str, Any]) -> float | None:
    limit = record.get("time_limit")
    if not limit:
        return None
    seconds, nanos = (limit.get("seconds") or 0, limit.get("nanos") or 0) if isinstance(limit, Mapping) else (limit, 0)
    if not all(isinstance(part, (int, float)) for part in (seconds, nanos)) or seconds + nanos < 0:
        raise ValueError(f'column "time_limit" is {repr(limit)[:100]}: expected {{"seconds": ..., "nanos": ...}}')
    return float(seconds + nanos / 1e9) or None


def _solution(record: Mapping[str, Any]) -> tuple[str, str]:
    """Its first solution in Python 3, or else in C++."""
    found = record.get("solutions")
    if not isinstance(found, Mapping):
        return "python", ""
    known = list(zip(found.get("language") or [], found.get("solution") or [], strict=False))
    for number, language in _LANGUAGES.items():
        for each, text in known:
            if each == number and isinstance(text, str):
                return language, text
    return "python", ""


def _statement(record: Mapping[str, Any], test_s: float | None, memory: float | None) -> str:
    limits = [
        f"Time limit per test: {test_s:g} seconds" if test_s else "",
        f"Memory limit per test: {memory / (1 << 20):g} megabytes" if memory else "",
    ]
    return "\n\n".join(filter(None, ["\n".join(filter(None, limits)), text_in(record, "description")]))
