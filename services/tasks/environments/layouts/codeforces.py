"""Rows of open-r1/codeforces.

Columns as on the data set's card (huggingface.co/datasets/open-r1/codeforces) and as huggingface/open-r1 reads them in
src/open_r1/utils/competitive_programming/cf_scoring.py: id, title, description, input_format, output_format,
interaction_format, note, examples and official_tests (lists of {"input", "output"}), official_tests_complete, time_limit
(seconds), memory_limit (megabytes), rating, contest_start (seconds since 1970), input_mode ("stdio" or "file"),
generated_checker (a Python program, where several answers are right). Tests that the set keeps in files of their own may be
merged into "generated_tests".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    number_in,
    positive_in,
    rating_in,
    read_tests,
    text_in,
)
from gspo_services.tasks.environments.programs import CheckerProgram, ProgramTest

CODEFORCES_COLUMNS: Final = frozenset({"description", "official_tests"})
_SECTIONS: Final = (("input_format", "Input"), ("output_format", "Output"), ("note", "Note"))


def codeforces_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    if record.get("interaction_format"):
        raise ValueError("it is interactive (interaction_format), and programs are given their whole input at once")
    if record.get("input_mode", "stdio") not in ("stdio", None):
        raise ValueError(
            f'column "input_mode" is {record["input_mode"]!r}: only problems that read standard input can be run'
        )
    examples = read_tests(record.get("examples") or [], "examples", public=True)
    memory, start = positive_in(record, "memory_limit"), number_in(record, "contest_start")
    checker = text_in(record, "generated_checker", needed=False)
    return ProgramRow(
        statement=_statement(record, examples),
        tests=_tests(record, examples),
        checker=CheckerProgram(source=checker, language="python", kind="prints") if checker.strip() else None,
        time_limit_s=positive_in(record, "time_limit"),
        memory_bytes=None if memory is None else round(memory * (1 << 20)),
        name=text_in(record, "id", needed=False),
        rating=rating_in(record, "rating"),
        date=None if start is None else datetime.fromtimestamp(start, tz=UTC).date(),
    )


def _tests(record: Mapping[str, Any], examples: list[ProgramTest]) -> list[ProgramTest]:
    """The official tests and those that were generated; the examples where there are neither."""
    generated = record.get("generated_tests")
    hidden = [
        *read_tests(column(record, "official_tests") or [], "official_tests"),
        # In some configurations this is how many there are, and they lie in files of their own.
        *read_tests(generated if isinstance(generated, list) else [], "generated_tests"),
    ]
    if not hidden and generated and not isinstance(generated, list):
        raise ValueError(
            f'column "official_tests" is empty, and its {generated} generated tests lie in another file: merge them '
            'into a list in "generated_tests"'
        )
    shown = {(test.input.strip(), test.output.strip()) for test in examples}
    return [*examples, *(test for test in hidden if (test.input.strip(), test.output.strip()) not in shown)]


def _statement(record: Mapping[str, Any], examples: list[ProgramTest]) -> str:
    title = text_in(record, "title", needed=False)
    parts = [f"# {title}" if title else "", text_in(record, "description")]
    parts += [f"## {heading}\n{text}" for name, heading in _SECTIONS if (text := text_in(record, name, needed=False))]
    parts += [
        f"## Example {number}\nInput:\n{test.input.rstrip()}\nOutput:\n{test.output.rstrip()}"
        for number, test in enumerate(examples, start=1)
    ]
    return "\n\n".join(part for part in parts if part)
