"""Programs for rows of LiveCodeBench: usual and odd ones, right and wrong."""

import json
from collections.abc import Mapping
from typing import Any, Final

from tests.sandbox.programs.official.cases import read_cases


def row(*tests: tuple[str, str], function: str = "") -> dict[str, Any]:
    """A row in the published columns."""
    kind = "functional" if function else "stdin"
    cases = [{"input": given, "output": said, "testtype": kind} for given, said in tests]
    return {
        "question_title": "T", "question_content": "Q", "platform": "leetcode" if function else "atcoder",
        "question_id": "q", "contest_id": "c", "contest_date": "2024-01-01T00:00:00", "difficulty": "easy",
        "starter_code": f"class Solution:\n    def {function}(self, a):\n        " if function else "",
        "public_test_cases": json.dumps(cases[:1]), "private_test_cases": json.dumps(cases[1:]),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }  # fmt: skip


ROWS: Final[Mapping[str, dict[str, Any]]] = {
    "sum": row(("3\n1 2 3\n", "6\n"), ("2\n-5 5\n", "0\n")),
    "lines": row(("2\n1 2\n3 4\n", "3\n7\n"), ("1\n0 0\n", "0\n")),
    "third": row(("1 3\n", "0.3333333333\n")),
    "half": row(("1 2\n", "0.50\n")),
    "word": row(("abc\n", "cba\n")),
    "empty": row(("1\n", "")),
    "mid": row(("[1, 2, 3]", "2"), ("[4, 4, 4]", "4"), function="mid"),
    "list": row(("[1, 2]", "[1, 2]"), ("[]", "[]"), function="same"),
    "pairs": row(("[1, 2]", "[[1, 2], [3, 4]]"), function="pairs"),
    "float": row(("3", "0.3"), function="tenth"),
    "bool": row(("1", "true"), function="odd"),
    "text": row(('"ab"', '"ba"'), function="turn"),
    "null": row(("1", "null"), function="nothing"),
    "map": row(("1", '{"a": 1}'), function="made"),
    "big": row(("70", str(10**70)), function="power"),
    "two": row(("[1, 2]\n3", "6"), function="total"),
}


def asked_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The tests of a row as APPS has them: inputs, outputs and fn_name."""
    tests = [*json.loads(row["public_test_cases"]), *json.loads(row["private_test_cases"])]
    asked: dict[str, Any] = {name: [test[name.removesuffix("s")] for test in tests] for name in ("inputs", "outputs")}
    function = json.loads(row["metadata"]).get("func_name")
    return {**asked, "fn_name": function} if function else asked


CASES: Final = read_cases("programs_livecodebench.txt")

EXPLAINED: Final[Mapping[str, str]] = {
    "f equal to all": "theirs compares by the program's own __eq__, which can say anything; here only values leave it",
    "f state that stays": "theirs calls all tests in one process; here each test has a process of its own, as on the site",
}
"""Programs of which ours says another thing, and why."""
