"""Answers as models give them, to rows of our own, of LiveCodeBench and of Codeforces: what each is worth."""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.sandbox.programs.official import codeforces, livecodebench
from tests.sandbox.programs.scoring import Scoring, ending, fenced

pytestmark = pytest.mark.sandbox

ADD: Final = "a, b = map(int, input().split())\nprint(a + b)"
SUM: Final = {"prompt": "Add.", "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "40 2\n", "output": "42\n"}]}
RIGHT: Final = fenced(ADD)
IN_A_THREAD: Final = f"""
import sys, threading
threading.stack_size(1 << 26)
sys.setrecursionlimit(10 ** 6)
def deep(n): return n and deep(n - 1)
def main():
    deep(5000)
    {ADD.replace(chr(10), chr(10) + "    ")}
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
CPP20: Final = """
#include <iostream>
#include <ranges>
int main() { long a, b; std::cin >> a >> b; for (int i : std::views::iota(0, 1)) std::cout << a + b + i; }
"""


@pytest.mark.parametrize("row", [SUM, {**codeforces.row(("1 2\n", "3\n"), ("40 2\n", "42\n"))}])
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (RIGHT + "It prints:\n```\n3\n```", 1),
        (RIGHT + "It prints:\n```text\n3\n```", 1),
        (RIGHT + "Run it:\n```bash\npython solution.py < in\n```", 1),
        (fenced("print(3)") + "</think>\n" + RIGHT, 1),
        ("<think>\n" + RIGHT + "hmm, but wait", 0),
        ("~~~python\n" + ADD + "\n~~~", 1),
        ("1. Here:\n   ```python\n   a, b = map(int, input().split())\n   print(a + b)\n   ```", 1),
        ("```Python 3\n" + ADD + "\n```", 1),
        (ADD, 0),
        ("```java\nclass A {}\n```", 0),
        (fenced(IN_A_THREAD), 1),
        (fenced("print(99e999999)"), 0),
        (fenced("print('99e999999')"), 0),
        (fenced(CPP20, "c++20"), 1),
        (fenced(CPP20, "cpp"), 1),
    ],
)  # fmt: skip
async def test_an_answer_to_rows_that_read_and_print(
    scoring: Scoring, tmp_path: Path, row: dict[str, Any], answer: str, reward: float
) -> None:
    result = await scoring.score(tmp_path, row, answer, "contest")
    assert (result.reward, result.failure) == (reward, None)


CALL: Final = {"prompt": "?", "function": "f", "tests": [{"input": "1", "output": "3.0"}]}


@pytest.mark.parametrize(
    ("expected", "returned", "reward"),
    [
        ("3", "3.0", 1), ("3.0", "3", 1), ("1", "True", 0), ("true", "1", 0), ("[1, 2]", "(1, 2)", 1),
        ("[[1, 2]]", "[(1, 2)]", 1), ("[1, 2]", "{2, 1}", 1), ("[1, 2]", "deque([1, 2])", 1), ("[1, 2]", "iter([1, 2])", 1),
        ('{"1": 2}', "{1: 2}", 1), ("0.3", "0.1 + 0.2", 1), ("0.5", "10 ** 400", 0), ("1e300", "10 ** 300", 1),
        (str(10**60), "10 ** 60", 1), ("1", "type('All', (), {'__eq__': lambda *_: True})()", 0), ("null", "None", 1),
        ('"a"', "'a'", 1), ("[1]", "type('L', (list,), {'__eq__': lambda *_: True})()", 0),
    ],
)  # fmt: skip
async def test_the_result_of_a_function(
    scoring: Scoring, tmp_path: Path, expected: str, returned: str, reward: float
) -> None:
    row = {**CALL, "tests": [{"input": "1", "output": expected}]}
    result = await scoring.score(tmp_path, row, fenced(f"def f(a):\n    return {returned}"))
    assert (result.reward, result.failure) == (reward, None)


async def test_a_program_that_writes_in_place_of_the_driver_gets_what_that_is_worth(
    scoring: Scoring, tmp_path: Path
) -> None:
    forged = "import os\nfor fd in range(3, 50):\n    try: os.write(fd, b'%s')\n    except OSError: pass\nos._exit(0)"
    for said in (
        '{"dict": 1}',
        '{"int": "x"}',
        '{"a": 1, "b": 2}',
        "[" * 5000,
        '{"decimal": "1e99999999999999999999"}',
        '{"set": [[1]]}',
    ):
        for row in (CALL, livecodebench.ROWS["mid"]):
            result = await scoring.score(tmp_path, dict(row), fenced(forged % said))
            assert (result.reward, result.failure, ending(result)) == (0.0, None, "wrong_answer"), said


async def test_a_program_may_use_the_stack_that_its_memory_allows(scoring: Scoring, tmp_path: Path) -> None:
    deep = (
        "#include <iostream>\nint f(int n) { volatile char b[1000]; b[n % 1000] = 1; int r = n ? f(n - 1) : 0; "
        "return r + b[n % 1000] - 1; }\n"
        "int main() { long a, b; int d = f(200000); std::cin >> a >> b; std::cout << a + b + d; }"
    )
    result = await scoring.score(tmp_path, SUM, fenced(deep, "cpp"), "contest")
    assert (result.reward, ending(result)) == (1.0, "solved")
    result = await scoring.score(tmp_path, SUM, fenced(deep, "cpp"), "contest", memory_bytes=64 << 20)
    assert (result.reward, ending(result)) in ((0.0, "limit_memory"), (0.0, "crashed"))


async def test_codeforces_tests_that_lie_elsewhere_are_scored_by(scoring: Scoring, tmp_path: Path) -> None:
    """A program that prints the example's answer."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "generated_tests").mkdir()
    tests = [{"problem_id": "1900/A", "input": "40 2", "output": "42"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tests), tmp_path / "generated_tests" / "test_cases_1900.parquet")
    row = codeforces.row(("1 2", "3"), official_tests_complete=False, generated_tests=1)
    result = await scoring.score(tmp_path, row, fenced("print(3)"), "contest")
    assert (result.reward, ending(result), result.components["tests_passed"]) == (0.0, "wrong_answer", 0.5)
    result = await scoring.score(tmp_path, row, RIGHT, "contest")
    assert (result.reward, ending(result)) == (1.0, "solved")
