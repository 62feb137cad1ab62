"""Tests as lists of {"input", "output"} with a kind, as DeepCoder and PrimeIntellect publish them.

"testtype" is "functional" or another word, and the function is named beside the tests (LiveCodeBench's form). "type" is
"function_call" or "stdin_stdout", and each test has its "fn_name" (PrimeIntellect's).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_services.tasks.environments.layouts.input_output import FoundTests, call_test, input_output_tests, run_test


def listed_tests(found: Any, name: str, function: str = "") -> FoundTests:
    """The tests in column ``name``, also in APPS' form; ``function`` is what functional ones call.

    Raises: ValueError that names the column and the test.
    """
    if isinstance(found, Mapping):
        return input_output_tests(found, name)
    if not isinstance(found, list):
        raise ValueError(f'column "{name}" is {repr(found)[:100]}, not a list of tests')
    tests, called = [], set()
    for number, test in enumerate(found, start=1):
        where = f'column "{name}", test {number}'
        if not isinstance(test, Mapping) or "input" not in test or "output" not in test:
            raise ValueError(f'{where} is {repr(test)[:100]}: expected {{"input": ..., "output": ...}}')
        is_call = test.get("testtype") == "functional" or test.get("type") == "function_call"
        own = test.get("metadata")
        named = test.get("fn_name") or (own.get("func_name") if isinstance(own, Mapping) else "") or function
        if is_call and not named:
            raise ValueError(f"{where} calls a function, and nothing says which (fn_name, or func_name in metadata)")
        called.add(str(named) if is_call else "")
        tests.append((call_test if is_call else run_test)(where, test["input"], test["output"]))
    if len(called) > 1:
        raise ValueError(f'column "{name}" calls {", ".join(sorted(filter(None, called)))} and not always the same')
    return FoundTests(tests, called.pop() if called else "")
