"""How the owners of public sets compare outputs and results. Nothing here raises, whatever a program says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

_YES_NO: Final = re.compile(r"\b(yes|no)\b", re.IGNORECASE | re.ASCII)
_INTEGER: Final = re.compile(r"[+-]?\d+", re.ASCII)


def livecodebench_output(expected: str, actual: str) -> bool:
    """The same lines, or lines of decimals that are equal; blanks around each line do not matter.

    LiveCodeBench/LiveCodeBench: lcb_runner/evaluation/testing_util.py, grade_stdio.
    """
    wanted, said = _stripped_lines(expected), _stripped_lines(actual)
    return len(wanted) == len(said) and all(
        one == other or _same_numbers(Decimal, one, other) for one, other in zip(wanted, said, strict=True)
    )


def livecodebench_result(expected: Any, actual: Any) -> bool:
    """``==``, after a tuple has become a list. The same file, grade_call_based."""
    return _equal(list(actual) if isinstance(actual, tuple) else actual, expected)


def codeforces_output(expected: str, actual: str) -> bool:
    """The same tokens, where "yes" and "no" may be in capitals or not; 1.0 is not 1.

    guipenedo/piston: packages/codeforces/1.0.0/run, normalize_output, by which huggingface/open-r1 scores.
    """
    return _tokens_of_yes_and_no(expected) == _tokens_of_yes_and_no(actual)


def prime_output(expected: str, actual: str) -> bool:
    """The same lines without empty ones, or as many lines that are single numbers each; fractions may be off by 1e-5.

    verl: verl/utils/reward_score/prime_code/testing_util.py. It came from hendrycks/apps and leaves out that file's last
    rule, by which tokens may stand in any order and number.
    """
    wanted, said = ([line for line in _stripped_lines(text) if line] for text in (expected, actual))
    if wanted == said:
        return True
    if len(wanted) != len(said) or all(_INTEGER.fullmatch(line) for line in (*wanted, *said)):
        return False
    try:
        pairs = [(float(one), float(other)) for one, other in zip(wanted, said, strict=True)]
    except ValueError:
        return False
    return all(one == other or abs(one - other) <= 1e-8 + 1e-5 * abs(one) for one, other in pairs)


def prime_result(expected: Any, actual: Any) -> bool:
    """``==`` to the expected result, or to the first element of it where that is a list; a tuple is a list at the top, and
    keys are whole numbers where they all read so. The same file."""
    wanted, said = _with_int_keys(expected), list(actual) if isinstance(actual, tuple) else actual
    if _equal(said, wanted):
        return True
    if not isinstance(wanted, list) or not wanted:
        return False
    if isinstance(said, list) and said and isinstance(said[0], tuple):
        said = [list(each) if isinstance(each, tuple) else each for each in said]
    return _equal(said, wanted[0])


def code_contests_output(expected: str, actual: str) -> bool:
    """The same tokens in lower case; numbers may be off by 1e-5, whole ones may not.

    google-deepmind/code_contests: execution/tester_sandboxer.cc, OutputsMatch.
    """
    wanted, said = expected.lower().split(), actual.lower().split()
    return len(wanted) == len(said) and all(
        one == other or _is_near(one, other) for one, other in zip(wanted, said, strict=True)
    )


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(read: Callable[[str], object], one: str, other: str) -> bool:
    try:
        wanted, said = [read(token) for token in one.split()], [read(token) for token in other.split()]
        return wanted == said
    except (ArithmeticError, ValueError):
        return False


def _tokens_of_yes_and_no(text: str) -> Sequence[bytes]:
    # As bytes, of which only ASCII's blanks are blanks.
    return _YES_NO.sub(lambda found: found[0].upper(), text).encode("utf-8", "surrogatepass").split()


def _is_near(one: str, other: str) -> bool:
    if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
        return False if max(len(one), len(other)) > 4000 else int(one) == int(other)
    try:
        return abs(float(one) - float(other)) < 1e-5
    except ValueError:
        return False


def _with_int_keys(value: Any) -> Any:
    inner = value[0] if isinstance(value, list) and value else value
    if not isinstance(inner, dict):
        return value
    try:
        return [{int(key): each for key, each in inner.items()}]
    except ValueError:
        return value


def _equal(said: Any, wanted: Any) -> bool:
    try:
        return bool(said == wanted)
    except (ArithmeticError, ValueError, RecursionError):
        return False
