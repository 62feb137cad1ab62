"""Programs for rows of open-r1/codeforces: usual and odd ones, right and wrong."""

from collections.abc import Mapping
from typing import Any, Final

from tests.sandbox.programs.official.cases import read_cases

PERMUTATION: Final = """\
import sys
n = int(open(sys.argv[1]).read())
said = open(sys.argv[3]).read().split()
print(1 if sorted(map(int, said)) == list(range(1, n + 1)) else 0)
"""
SAME_LINES: Final = """\
import sys
answer, said = open(sys.argv[2]).read(), open(sys.argv[3]).read()
print(100 if answer.split('\\n')[:2] == said.split('\\n')[:2] else 0)
"""


def row(*tests: tuple[str, str], **more: Any) -> dict[str, Any]:
    """A row in the published columns."""
    cases = [{"input": given, "output": said} for given, said in tests]
    return {
        "id": "1900/A", "aliases": None, "contest_id": "1900", "contest_name": "Round", "contest_type": "CF",
        "contest_start": 1700000000, "contest_start_year": 2023, "index": "A", "time_limit": 2.0, "memory_limit": 256.0,
        "title": "Add", "description": "Add two numbers.", "input_format": "Two integers.", "output_format": "One integer.",
        "interaction_format": None, "note": None, "examples": cases[:1], "editorial": None, "rating": 800,
        "tags": ["math"], "testset_size": len(cases), "official_tests": cases, "official_tests_complete": True,
        "input_mode": "stdio", "generated_checker": None, "executable": True, "generated_tests": 0, **more,
    }  # fmt: skip


ROWS: Final[Mapping[str, dict[str, Any]]] = {
    "sum": row(("1 2\n", "3\n"), ("40 2", "42"), ("-5 5\r\n", "0\r\n")),
    "many": row(("2\n1 2\n3 4\n", "3\n7\n")),
    "parity": row(("3\n", "YES\n"), ("4\n", "NO\n")),
    "words": row(("3\n", "Yes, it is\n")),
    "third": row(("1 3\n", "0.333333333\n")),
    "half": row(("1 2\n", "0.5\n")),
    "word": row(("abc\r\n", "abc\r\n")),
    "nothing": row(("1\n", "")),
    "permutation": row(("3\n", "1 2 3\n"), ("1", "1"), generated_checker=PERMUTATION),
    "two lines": row(("1\n", "a\n\nb\n"), generated_checker=SAME_LINES),
    "fast": row(("1 2\n", "3\n"), time_limit=0.5),
    "small": row(("1 2\n", "3\n"), memory_limit=64.0),
}

CASES: Final = read_cases("programs_codeforces.txt")

EXPLAINED: Final[Mapping[str, str]] = {
    "c++20": "theirs compiles C++17 alone; C++20 is a language of the site today",
}
"""Programs of which ours says another thing, and why."""
