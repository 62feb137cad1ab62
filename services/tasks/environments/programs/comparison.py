"""Whether a program's output is the expected one: by trimmed lines, then by tokens, then by numbers with a tolerance.

So are rows of your own compared. How the owners of public sets compare theirs is in public_rules.py.
"""

from __future__ import annotations

import decimal
import math
import re
from decimal import Decimal
from typing import Final

_NUMBER: Final = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,6})?")
_MOST_DIGITS: Final = 4_000
_EXACT_ENOUGH: Final = decimal.Context(prec=28, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])
"""Arithmetic on numbers of the policy's: nothing that it prints overflows, and what has no value equals nothing."""


def same_output(expected: str, actual: str, tolerance: float) -> bool:
    """Whether ``actual`` says what ``expected`` says.

    Blanks at the ends of lines and of the whole do not matter, nor how tokens are spread over lines. A token that is a
    number may be written otherwise (1.50 and 1.5). One that is expected with a fraction or an exponent may differ by
    ``tolerance``, absolutely or relative to it; whole numbers must be equal.
    """
    if _lines(expected) == _lines(actual):
        return True
    wanted, said = expected.split(), actual.split()
    return len(wanted) == len(said) and all(
        one == other or _same_number(one, other, tolerance) for one, other in zip(wanted, said, strict=True)
    )


def same_value(expected: object, actual: object, tolerance: float) -> bool:
    """Whether a function's result is the expected one: a number may differ by ``tolerance`` where a fraction is expected,
    and a truth value is no number."""
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(
            same_value(one, other, tolerance) for one, other in zip(expected, actual, strict=True)
        )
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(
            same_value(value, actual[key], tolerance) for key, value in expected.items()
        )
    if _is_number(expected) and _is_number(actual):
        return expected == actual or (isinstance(expected, float) and _is_near(expected, actual, tolerance))
    return type(expected) is type(actual) and expected == actual


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_number(expected: str, actual: str, tolerance: float) -> bool:
    if max(len(expected), len(actual)) > _MOST_DIGITS or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(actual)):
        return False
    with decimal.localcontext(_EXACT_ENOUGH):
        wanted, said = Decimal(expected), Decimal(actual)
        if wanted == said:
            return True
        if expected.lstrip("+-").isdigit():
            return False
        return abs(wanted - said) <= Decimal(tolerance) * max(Decimal(1), abs(wanted))


def _is_near(expected: float, actual: object, tolerance: float) -> bool:
    assert isinstance(actual, (int, float))
    try:
        actual = float(actual)
    except OverflowError:
        return False  # An int that no float holds.
    # The tolerance of an infinity would take every number.
    return math.isfinite(expected) and abs(expected - actual) <= tolerance * max(1.0, abs(expected))
