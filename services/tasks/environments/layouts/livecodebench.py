"""Rows of LiveCodeBench: code_generation and code_generation_lite.

Columns as in LiveCodeBench/LiveCodeBench, lcb_runner/benchmarks/code_generation.py (class CodeGenerationProblem and
load_code_generation_dataset): question_title, question_content, platform, question_id, contest_id, contest_date,
starter_code, difficulty, public_test_cases and private_test_cases (JSON lists of {"input", "output", "testtype"}), metadata
(JSON, with "func_name" where a function is called). In code_generation_lite private_test_cases is packed: base64 of zlib of
a pickle of the JSON text. A functional test has one argument a line, each as JSON, and its result as JSON
(lcb_runner/evaluation/testing_util.py, grade_call_based).
"""

from __future__ import annotations

import base64
import json
import pickletools
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.program_rows import (
    ProgramRow,
    column,
    date_in,
    json_in,
    read_tests,
    text_in,
    total_of,
)
from gspo_services.tasks.environments.programs import unzipped

_TEXT: Final = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS: Final = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
"""What stands around a text: version, length, and numbers under which it could be named again."""


def pickled_text(data: bytes) -> str:
    """The text that ``data`` is the pickle of, without unpickling, because a pickle may run any program.

    Raises: ValueError for any other pickle, and for what is none.
    """
    found: list[str] = []
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in _TEXT and isinstance(argument, str):
                found.append(argument)
            elif opcode.name not in _HARMLESS:
                raise ValueError(f"the pickle has {opcode.name} at byte {position}: expected one text and nothing else")
    except (IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"it is not a pickle: {error}") from error
    if len(found) != 1:
        raise ValueError(f"the pickle has {len(found)} texts: expected one")
    return found[0]


TEST_S: Final = 6.0
MEMORY_BYTES: Final = 4 << 30
"""As its runner has them: the default of run_test, and what reliability_guard says and does not enforce."""
LIVECODEBENCH_COLUMNS: Final = frozenset({"question_content", "public_test_cases", "private_test_cases"})


def livecodebench_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    public = json_in(record, "public_test_cases")
    private = _private(record)
    metadata = json_in(record, "metadata") if record.get("metadata") else {}
    if not isinstance(metadata, dict):
        raise ValueError(f'column "metadata" is {repr(metadata)[:100]}, not a map')
    function = metadata.get("func_name") or ""
    tests = [*read_tests(public, "public_test_cases", public=True), *read_tests(private, "private_test_cases")]
    if not function and any(test.get("testtype") == "functional" for test in [*public, *private]):
        raise ValueError('its tests are functional, and column "metadata" has no func_name')
    return ProgramRow(
        statement=text_in(record, "question_content"),
        tests=tests,
        starter_code=text_in(record, "starter_code", needed=False),
        function=str(function),
        owner="livecodebench",
        time_limit_s=TEST_S,
        memory_bytes=MEMORY_BYTES,
        total_s=total_of(TEST_S, len(tests)),
        name=text_in(record, "question_id", needed=False),
        difficulty=text_in(record, "difficulty", needed=False),
        date=date_in(record, "contest_date"),
    )


def _private(record: Mapping[str, Any]) -> Any:
    value = column(record, "private_test_cases")
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{", ""):
        return json_in(record, "private_test_cases") if value != "" else []
    try:
        return json.loads(pickled_text(unzipped(base64.b64decode(value, validate=True))))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'column "private_test_cases" does not unpack ({error}): it should be JSON, or base64 of zlib of a pickled '
            "text of JSON; load the row again from its source"
        ) from error
