"""Tests as APPS has them and many sets after it: {"inputs": [...], "outputs": [...], "fn_name": ...}.

Inputs of a program are texts or lists of lines. Inputs of a function are lists of arguments, or a text with one argument a
line, each as JSON (hendrycks/apps: eval/testing_util.py, run_test; verl: prime_code/testing_util.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from gspo_services.tasks.environments.programs import ProgramTest


class FoundTests(NamedTuple):
    """Tests, and the function that they call; "" for programs that read and print."""

    tests: list[ProgramTest]
    function: str


def input_output_tests(found: Any, name: str) -> FoundTests:
    """The tests in column ``name``. Raises: ValueError that names it and the test."""
    if not isinstance(found, Mapping) or not all(isinstance(found.get(key), list) for key in ("inputs", "outputs")):
        raise ValueError(f'column "{name}" has no lists "inputs" and "outputs"')
    inputs, outputs, function = found["inputs"], found["outputs"], str(found.get("fn_name") or "")
    if len(inputs) != len(outputs):
        raise ValueError(f'column "{name}" has {len(inputs)} inputs and {len(outputs)} outputs')
    read = call_test if function else run_test
    pairs = enumerate(zip(inputs, outputs, strict=True), start=1)
    return FoundTests([read(f'column "{name}", test {number}', *pair) for number, pair in pairs], function)


def run_test(where: str, given: Any, said: Any) -> ProgramTest:
    """A test of a program. Raises: ValueError that begins with ``where``."""
    return ProgramTest(input=_text(where, given), output=_text(where, said))


def call_test(where: str, given: Any, result: Any) -> ProgramTest:
    """A test of a function. Raises: ValueError that begins with ``where``."""
    if isinstance(given, str):
        given = [_json(where, line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"{where}: {repr(given)[:100]} is not a list of arguments")
    if isinstance(result, str):
        result = _json(where, result) if _is_json(result) else result
    return ProgramTest(input="\n".join(map(json.dumps, given)), output=json.dumps(result))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {text[:100]!r} is not JSON ({error})") from error


def _text(where: str, value: Any) -> str:
    """A text, or a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, (str, int, float)) for line in value):
        return "\n".join(map(str, value))
    raise ValueError(f"{where}: {repr(value)[:100]} is neither text nor a list of lines")
