"""Rows of open-r1/codeforces.

Columns as on the data set's card (huggingface.co/datasets/open-r1/codeforces) and as huggingface/open-r1 reads them in
src/open_r1/utils/competitive_programming/cf_scoring.py: id, title, description, input_format, output_format,
interaction_format, note, examples and official_tests (lists of {"input", "output"}), official_tests_complete, time_limit
(seconds), memory_limit (megabytes), rating, contest_start (seconds since 1970), input_mode ("stdio" or "file"), executable,
generated_checker (a Python program, where several answers are right) and generated_tests: how many more there are in the
file generated_tests/test_cases_<contest>.parquet; they may also be merged into the column, as a list. The configuration
"verifiable-prompts" adds language and prompt, which is asked as it is. Programs are scored by official_tests and the
generated tests; examples are only shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from gspo.tasks.environments import ChatMessage
from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    number_in,
    positive_in,
    rating_in,
    read_tests,
    text_in,
    total_of,
)
from gspo_services.tasks.environments.programs import CheckerProgram, ProgramTest

CODEFORCES_COLUMNS: Final = frozenset({"description", "official_tests"})
_SECTIONS: Final = (("input_format", "Input"), ("output_format", "Output"), ("note", "Note"))
_RETURNS: Final = re.compile(r"\r(?=\n|$)")


def codeforces_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    if record.get("interaction_format"):
        raise ValueError("it is interactive (interaction_format), and programs are given their whole input at once")
    if record.get("input_mode", "stdio") not in ("stdio", None):
        raise ValueError(
            f'column "input_mode" is {record["input_mode"]!r}: only problems that read standard input can be run'
        )
    if record.get("executable") is False:
        raise ValueError('column "executable" is false: the set\'s owners could not verify programs by its tests')
    examples = read_tests(record.get("examples") or [], "examples", public=True)
    tests, num_generated = _tests(record, examples)
    memory, start, test_s = (
        positive_in(record, "memory_limit"), number_in(record, "contest_start"), positive_in(record, "time_limit")
    )  # fmt: skip
    checker = text_in(record, "generated_checker", needed=False)
    prompt = text_in(record, "prompt", needed=False)
    messages: list[ChatMessage] = [{"role": "user", "content": prompt}] if prompt.strip() else []
    return ProgramRow(
        statement="" if messages else _statement(record, examples, test_s, memory),
        messages=messages,
        language=text_in(record, "language", needed=False),
        tests=tests,
        num_generated=num_generated,
        is_incomplete=record.get("official_tests_complete", True) is not True and not _merged(record),
        owner="codeforces",
        checker=CheckerProgram(source=checker, language="python", kind="prints") if checker.strip() else None,
        time_limit_s=test_s,
        memory_bytes=None if memory is None else round(memory * (1 << 20)),
        total_s=None if test_s is None else total_of(test_s, len(tests) + num_generated),
        name=text_in(record, "id", needed=False),
        rating=rating_in(record, "rating"),
        date=None if start is None else datetime.fromtimestamp(start, tz=UTC).date(),
    )


def with_unix_lines(test: ProgramTest) -> ProgramTest:
    """A test without the carriage returns that Codeforces has at the ends of lines."""
    return ProgramTest(input=_RETURNS.sub("", test.input), output=_RETURNS.sub("", test.output), public=test.public)


def _merged(record: Mapping[str, Any]) -> list[Any]:
    """Generated tests that stand in the row itself."""
    generated = record.get("generated_tests")
    return generated if isinstance(generated, list) else []


def _tests(record: Mapping[str, Any], examples: list[ProgramTest]) -> tuple[list[ProgramTest], int]:
    """The tests that the row has, and how many more lie in another file."""
    merged = _merged(record)
    tests = [
        *read_tests(column(record, "official_tests") or [], "official_tests"),
        *read_tests(merged, "generated_tests"),
    ]
    shown = {(test.input.strip(), test.output.strip()) for test in map(with_unix_lines, examples)}
    found = []
    for test in map(with_unix_lines, tests):
        public = (test.input.strip(), test.output.strip()) in shown
        found.append(ProgramTest(input=test.input, output=test.output, public=public))
    return found, 0 if isinstance(record.get("generated_tests"), list) else round(number_in(record, "generated_tests") or 0)


def _statement(record: Mapping[str, Any], examples: list[ProgramTest], test_s: float | None, memory: float | None) -> str:
    title = text_in(record, "title", needed=False)
    limits = [
        f"Time limit per test: {test_s:g} seconds" if test_s is not None else "",
        f"Memory limit per test: {memory:g} megabytes" if memory is not None else "",
    ]
    parts = [f"# {title}" if title else "", "\n".join(filter(None, limits)), text_in(record, "description")]
    parts += [f"## {heading}\n{text}" for name, heading in _SECTIONS if (text := text_in(record, name, needed=False))]
    parts += [
        f"## Example {number}\nInput:\n{test.input.rstrip()}\nOutput:\n{test.output.rstrip()}"
        for number, test in enumerate(examples, start=1)
    ]
    return "\n\n".join(part for part in parts if part)
