"""A row of each public set, in its published columns: what right, odd and wrong programs are worth by its owners' rules."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.sandbox.programs.scoring import Scoring, fenced

pytestmark = pytest.mark.sandbox

TESTS: Final = {"inputs": ["1 2\n", "40 2\n"], "outputs": ["3\n", "42\n"]}
CALLS: Final = {"fn_name": "f", "inputs": [[[1, 2]], [[3]]], "outputs": [[[1, 2]], [[3]]]}
HALVES: Final = {"inputs": ["1 2\n"], "outputs": ["0.5\n"]}
LISTED: Final = [{"input": given, "output": said} for given, said in zip(TESTS["inputs"], TESTS["outputs"], strict=True)]
ADD: Final = "a, b = map(int, input().split())\n"


def apps(found: object) -> dict[str, Any]:
    return {"problem_id": 1, "question": "?", "solutions": "", "input_output": json.dumps(found), "starter_code": ""}


def verl(found: object) -> dict[str, Any]:
    return {
        "data_source": "taco", "prompt": [{"role": "user", "content": "?"}], "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(found)}, "extra_info": {"index": 0},
    }  # fmt: skip


def deepcoder(found: object) -> dict[str, Any]:
    return {"problem": "?", "tests": json.dumps(found), "solutions": [], "starter_code": "", "metadata": "{}"}


def primeintellect(found: object) -> dict[str, Any]:
    return {"problem_id": "1", "problem_statement": "?", "verification_info": {"language": "python", "test_cases": found}}


def code_contests(tests: dict[str, Any]) -> dict[str, Any]:
    both = {"input": tests["inputs"], "output": tests["outputs"]}
    return {
        "name": "A", "description": "?", "public_tests": both, "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": [], "output": []}, "time_limit": {"seconds": 2, "nanos": 0},
        "memory_limit_bytes": 256_000_000, "solutions": {"language": [], "solution": []},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "programs"),
    [
        (apps(TESTS), {"print(a + b)": 1, "print(float(a + b))": 1, "print(a - b)": 0, "print(sum(deque([a, b])))": 1,
                       "print(a + b)\nsys.exit(1)": 1, "print('99e999999')": 0, "print(a + b)\nraise ValueError": 0}),
        (apps(HALVES), {"print(a / b + 1e-7)": 1, "print(a / b + 1e-3)": 0, "print(f'{a / b} {a}')": 0}),
        (verl(TESTS), {"print(a + b)": 1, "print(heappop([a + b]))": 1, "print(3)": 0}),
        (deepcoder([{**test, "testtype": "stdin_stdout"} for test in LISTED]), {"print(a + b)": 1, "print(3)": 0}),
        (deepcoder(TESTS), {"print(a + b)\nreturn": 1, "print(a + b + 1e-9)": 0}),
        (primeintellect([{**test, "type": "stdin_stdout", "fn_name": None} for test in LISTED]),
         {"print(a + b)": 1, "print(3)": 0}),
        (code_contests(TESTS), {"print(a + b)": 1, "print(a + b + 1e-7)": 1, "print(3)": 0, "print(deque([a + b])[0])": 0}),
        (code_contests({"inputs": ["1 2\n"], "outputs": ["YES\n"]}), {"print('yes')": 1, "print('y')": 0}),
    ],
)  # fmt: skip
async def test_programs_that_read_and_print(
    scoring: Scoring, tmp_path: Path, row: dict[str, Any], programs: dict[str, int]
) -> None:
    for program, reward in programs.items():
        result = await scoring.score(tmp_path, row, fenced(ADD + program))
        assert (result.reward, result.failure) == (reward, None), program


@pytest.mark.parametrize(
    ("row", "programs"),
    [
        (apps(CALLS), {"a": 1, "tuple(a)": 1, "a + a": 0, "deepcopy(a)": 1, "[float(x) for x in a]": 1, "[a]": 1}),
        (verl({"fn_name": "f", "inputs": ["[1]\n2"], "outputs": ["3"]}), {"a[0] + b": 1, "3.0": 1, "a": 0}),
        (apps({"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"2": 1}]}), {"{a[1]: 1}": 1, "a": 0}),
        (deepcoder(CALLS), {"a": 1, "a[1:]": 0}),
        (primeintellect([{"type": "function_call", "fn_name": "f", "input": [1], "output": [1]}]), {"a": 1, "-a": 0}),
    ],
)  # fmt: skip
async def test_functions(scoring: Scoring, tmp_path: Path, row: dict[str, Any], programs: dict[str, int]) -> None:
    for result_of, reward in programs.items():
        result = await scoring.score(tmp_path, row, fenced(f"def f(a, b=0):\n    return {result_of}"))
        assert (result.reward, result.failure) == (reward, None), result_of
