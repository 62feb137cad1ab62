"""Checker programs: several right answers, and checkers that are at fault themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo_services.tasks.environments.programs import checkers
from tests.sandbox.programs.scoring import Scoring, ending, fenced

pytestmark = pytest.mark.sandbox

PRINTS = """
import sys
given, answer, output = (open(path).read().split() for path in sys.argv[1:4])
assert answer == ["2", "3"]
print(1 if int(output[0]) * int(output[1]) == int(given[0]) else 0)
"""
EXITS = """
#include <fstream>
int main(int argc, char** argv) {
    std::ifstream input(argv[1]), output(argv[2]), answer(argv[3]);
    long n, a, b, right;
    if (!(input >> n) || !(answer >> right)) return 3;
    if (!(output >> a >> b)) return 2;
    return a * b == n ? 0 : 1;
}
"""
TESTLIB = '#include "testlib.h"\nint main(int argc, char** argv) { return verdict(); }'


def factors(checker: str, language: str, kind: str) -> dict[str, Any]:
    """A problem with several right answers."""
    return {
        "prompt": "Two factors?",
        "rating": 800,
        "tests": [{"input": "6\n", "output": "2 3\n"}],
        "checker": {"source": checker, "language": language, "kind": kind},
    }


BOTH = pytest.mark.parametrize("row", [factors(PRINTS, "python", "prints"), factors(EXITS, "cpp", "testlib")])


@BOTH
async def test_every_right_answer_is_taken(scoring: Scoring, tmp_path: Path, row: dict[str, Any]) -> None:
    for said, reward in (("2 3", 1.0), ("1 6", 1.0), ("-6 -1", 1.0), ("2 4", 0.0)):
        result = await scoring.score(tmp_path, row, fenced(f"print('{said}')"), "contest")
        assert (result.reward, ending(result)) == (reward, "solved" if reward else "wrong_answer"), said


@pytest.mark.parametrize(
    "checker",
    [
        PRINTS,
        "import os, sys\nprint(1) if '3' in open(sys.argv[3]).read() else os.abort()",
        "import sys\nif '3' in open(sys.argv[3]).read(): print(1)",
        "import sys\nwhile '3' not in open(sys.argv[3]).read(): pass\nprint(1)",
        "import sys\nprint(1 if '3' in open(sys.argv[3]).read() else 'perhaps')",
    ],
)
async def test_a_checker_that_takes_the_expected_output_and_fails_on_garbage_gives_it_0(
    scoring: Scoring, tmp_path: Path, checker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the attempt failed, what the policy does wrong would be left out of training."""
    monkeypatch.setattr(checkers, "CHECKER_LIMITS", replace(checkers.CHECKER_LIMITS, cpu_s=1))
    row = factors(checker, "python", "prints")
    for garbage in ("no", "2", ""):
        result = await scoring.score(tmp_path, row, fenced(f"print('{garbage}')"), "contest")
        assert (result.reward, result.failure, ending(result)) == (0.0, None, "checker_failed")
    result = await scoring.score(tmp_path, row, fenced("print('2 3')"), "contest")
    assert (result.reward, ending(result)) == (1.0, "solved")


async def test_a_checker_is_tried_before_the_first_answer_whatever_that_says(scoring: Scoring, tmp_path: Path) -> None:
    """It fails on the second test, which the first answers do not reach; a fault may not depend on the answer."""
    row = factors("import sys\nprint(1 if open(sys.argv[1]).read() == '6\\n' else 0)", "python", "prints")
    row["tests"].append({"input": "8\n", "output": "2 4\n"})
    for answer in (fenced("print('2 3')"), fenced("raise ValueError"), "no program"):
        result = await scoring.score(tmp_path, row, answer, "contest")
        assert (result.reward, result.failure) == (None, "bad_task")
        assert "its checker is at fault: given the expected output of test 2 it rejects it (0)" in result.detail


@BOTH
async def test_a_checker_is_not_asked_about_a_program_that_crashed(
    scoring: Scoring, tmp_path: Path, row: dict[str, Any]
) -> None:
    result = await scoring.score(tmp_path, row, fenced("print('2 3')\nraise SystemExit(1)"), "contest")
    assert (result.reward, ending(result)) == (0.0, "crashed")


@pytest.mark.parametrize(
    ("checker", "language", "kind", "says"),
    [
        ("", "python", "prints", "given the expected output of test 1 it said nothing"),
        ("print('perhaps')", "python", "prints", "said 'perhaps', and not 1 or 0"),
        ("print('checked')\nprint(1)", "python", "prints", "said 'checked1', and not 1 or 0"),
        ("print(0)", "python", "prints", "given the expected output of test 1 it rejects it"),
        ("1 / 0", "python", "prints", "crashed with status 1 .*ZeroDivisionError"),
        ("1 / 0", "python", "testlib", "crashed .*ZeroDivisionError"),
        ("int main() { return 1; }", "cpp", "testlib", "rejects it"),
        ("import os; os.abort()", "python", "prints", "was ended by signal 6"),
        ("int main() { return 3; }", "cpp", "testlib", "ended with status 3, which is no verdict"),
        ("int main( {", "cpp", "testlib", "does not compile"),
        (TESTLIB, "cpp", "testlib", "includes testlib.h: name the file in environment.options.testlib_path"),
    ],
)  # fmt: skip
async def test_a_checker_at_fault_scores_nobody_and_is_named(
    scoring: Scoring, tmp_path: Path, checker: str, language: str, kind: str, says: str
) -> None:
    row = factors(checker, language, kind)
    result = await scoring.score(tmp_path, row, fenced("print('2 3')"), "contest")
    assert (result.reward, result.failure) == (None, "bad_task")
    with pytest.raises(AssertionError, match=rf"rows.jsonl, line 1: .*{says}"):
        raise AssertionError(result.detail)


async def test_the_library_of_checkers_is_put_beside_them(scoring: Scoring, tmp_path: Path) -> None:
    library = tmp_path / "testlib.h"
    library.write_text("inline int verdict() { return 0; }\n")
    row = factors(TESTLIB, "cpp", "testlib")
    result = await scoring.score(tmp_path, row, fenced("print('2 3')"), "contest", testlib_path=str(library))
    assert (result.reward, ending(result)) == (1.0, "solved")
