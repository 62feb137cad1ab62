"""Programs of a policy: what they are worth, and what ends them. Real programs in real sandboxes."""

from pathlib import Path

import pytest

from tests.sandbox.programs.scoring import ADD, ADDITION, Scoring, ending, fenced

pytestmark = pytest.mark.sandbox


async def test_a_program_that_passes_all_tests_is_worth_1(scoring: Scoring, tmp_path: Path) -> None:
    result = await scoring.score(tmp_path, ADDITION, fenced(ADD))
    assert (result.reward, ending(result), result.components["tests_passed"]) == (1.0, "solved", 1.0)


async def test_a_program_in_another_language_is_compiled(scoring: Scoring, tmp_path: Path) -> None:
    program = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    result = await scoring.score(tmp_path, ADDITION, fenced(program, "cpp"), languages=["python", "cpp"])
    assert (result.reward, ending(result)) == (1.0, "solved")
    result = await scoring.score(tmp_path, ADDITION, fenced("int main({}", "cpp"), languages=["python", "cpp"])
    assert (result.reward, ending(result)) == (0.0, "not_compiled")
    # It was not asked for.
    result = await scoring.score(tmp_path, ADDITION, fenced(program, "cpp"))
    assert (result.reward, ending(result)) == (0.0, "no_program")


async def test_credit_is_given_for_all_tests_or_by_the_test(scoring: Scoring, tmp_path: Path) -> None:
    """A program that is right for the first and the third test."""
    almost = "a, b = map(int, input().split())\nprint(a + b if a < 40 else 0)"
    result = await scoring.score(tmp_path, ADDITION, fenced(almost))
    assert (result.reward, ending(result)) == (0.0, "wrong_answer")
    assert result.components["tests_passed"] == pytest.approx(1 / 3)
    result = await scoring.score(tmp_path, ADDITION, fenced(almost), partial_credit=True)
    assert (result.reward, ending(result)) == (pytest.approx(2 / 3), "wrong_answer")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("while True: pass", "limit_cpu"),
        ("import time\ntime.sleep(1000)", "limit_wall"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "limit_output"),
        ("kept = []\nwhile True: kept.append(bytearray(1 << 20) * 2)", "limit_memory"),
        ("import os, time\nfor _ in range(2): os.fork()\nkept = b'x' * (60 << 20)\ntime.sleep(1)", "limit_memory"),
        ("open('/tmp/a', 'wb').write(bytes(100 << 20))", "limit_file"),
        ("import os\nwhile True: os.fork()", "crashed"),
        ("raise SystemExit(3)", "crashed"),
        ("import os\nos.abort()", "crashed"),
        ("print(4)", "wrong_answer"),
        ("def broken(:", "crashed"),
    ],
)  # fmt: skip
async def test_a_program_that_fails_is_worth_0_and_the_episode_says_why(
    scoring: Scoring, tmp_path: Path, program: str, expected: str
) -> None:
    # A busy machine needs time to reach the other limits.
    test_s = 0.5 if expected in ("limit_cpu", "limit_wall") else 10
    result = await scoring.score(tmp_path, ADDITION, fenced(program), test_s=test_s, memory_bytes=128 << 20)
    assert (result.reward, result.failure) == (0.0, None)
    if expected == "limit_cpu" and ending(result) == "limit_wall":
        return  # a machine so busy that the program had less than a third of a core
    assert ending(result) == expected


async def test_all_tests_together_have_a_limit_too(scoring: Scoring, tmp_path: Path) -> None:
    slow = "import time\na, b = map(int, input().split())\nwhile time.process_time() < 0.1: pass\nprint(a + b)"
    row = {**ADDITION, "tests": ADDITION["tests"] * 10}
    result = await scoring.score(tmp_path, row, fenced(slow), test_s=5, total_s=1)
    assert (result.reward, ending(result)) == (0.0, "limit_total")
    assert 0 < result.components["tests_passed"] < 1


async def test_an_answer_without_a_program_is_worth_0_unless_it_may_be_bare(scoring: Scoring, tmp_path: Path) -> None:
    assert ending(await scoring.score(tmp_path, ADDITION, ADD)) == "no_program"
    assert ending(await scoring.score(tmp_path, ADDITION, ADD, unfenced=True)) == "solved"


FUNCTION = {
    "prompt": "Add.",
    "function": "add",
    "tests": [{"input": "1\n2", "output": "3"}, {"input": "[1]\n[2]", "output": "[1, 2]"}],
}


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("class Solution:\n    def add(self, a: List[int], b): print('noise'); return a + b", 1.0),
        ("def add(a, b): return tuple(a + b) if isinstance(a, list) else a + b", 1.0),
        ("def add(a, b): return str(a + b)", 0.0),
        ("def plus(a, b): return a + b", 0.0),
        ("def add(a, b):\n    import os\n    os.write(1, b'3')\n    os._exit(0)", 0.0),
    ],
)  # fmt: skip
async def test_a_function_is_called_and_its_result_compared(
    scoring: Scoring, tmp_path: Path, program: str, reward: float
) -> None:
    result = await scoring.score(tmp_path, FUNCTION, fenced(program))
    assert (result.reward, result.failure) == (reward, None)


async def test_a_program_cannot_find_what_it_should_print(scoring: Scoring, tmp_path: Path) -> None:
    """The secret is the expected output of another test; it is nowhere in the sandbox."""
    row = {"prompt": "?", "tests": [{"input": "1", "output": "1"}, {"input": "2", "output": "secret-9271"}]}
    spy = """
import os
found = "1"
for folder, _, names in os.walk("/"):
    if folder.startswith(("/usr", "/lib", "/proc", "/dev", "/opt", "/root")):
        continue
    for name in names:
        try:
            if b"secret-" + b"9271" in open(os.path.join(folder, name), "rb").read(1 << 20):
                found = "secret-9271"
        except OSError:
            pass
print(found)
"""
    result = await scoring.score(tmp_path, row, fenced(spy.replace('"secret-9271"', '"secret-" + "9271"')))
    assert (result.reward, ending(result)) == (0.0, "wrong_answer")
    assert result.components["tests_passed"] == 0.5


@pytest.mark.parametrize("said", ["99e999999", "-99e999999", "1e-999999", "9" * 300 + "e9999", "nan", "inf", "1e1000000"])
async def test_a_number_that_overflows_is_a_wrong_answer(scoring: Scoring, tmp_path: Path, said: str) -> None:
    row = {"prompt": "Halve three.", "tests": [{"input": "", "output": "1.5"}]}
    result = await scoring.score(tmp_path, row, fenced(f"print({said!r})"))
    assert (result.reward, ending(result)) == (0.0, "wrong_answer")


@pytest.mark.parametrize(
    "returned", ["10**400", "-10**400", "1e308 * 10", "float('nan')", "deep", "[1.5]", "{'1.5': 1.5}", "'1.5'", "None"]
)
async def test_a_result_that_overflows_is_a_wrong_answer(scoring: Scoring, tmp_path: Path, returned: str) -> None:
    row = {"prompt": "Halve.", "function": "f", "tests": [{"input": "3", "output": "1.5"}]}
    program = f"deep = [1]\nfor _ in range(900): deep = [deep]\ndef f(x):\n    return {returned}"
    result = await scoring.score(tmp_path, row, fenced(program))
    assert (result.reward, result.failure) == (0.0, None)
    assert ending(result) in ("wrong_answer", "crashed")
