"""Whether two expressions are equal: as fractions, or by their values at points drawn once for all, to 100 digits.

Nothing here simplifies, so nothing can run for ever: each operation has a bound, and what is above it is ``TooLarge``. Two
expressions that agree at every point are equal but for a chance far below that of a damaged bit (Schwartz 1980).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from gspo.tasks.maths.exact import TooLarge, Undefined, exact
from gspo.tasks.maths.expression import Name, Node, Number, Operation
from gspo.tasks.maths.numeric import DIGITS, coordinate, is_close, is_real, is_zero, value_at

_POINTS: Final = 8
_CONSTANTS: Final = ("\\pi", "e", "i", "\\infty")


def names_in(node: Node) -> frozenset[str]:
    """The variables of ``node``."""
    if isinstance(node, Number):
        return frozenset()
    if isinstance(node, Name):
        return frozenset() if node.name in _CONSTANTS else frozenset([node.name])
    return frozenset[str]().union(*(names_in(part) for part in node.parts))


def equal(first: Node, second: Node) -> bool:
    """Whether both have the same value, wherever both have one. Raises: TooLarge."""
    try:
        one, other = exact(first), exact(second)
    except Undefined:
        return False
    if one is not None and other is not None:
        return one == other
    with _digits():
        return _agree(_values(first, second))


def proportional(first: Node, second: Node) -> bool:
    """Whether one is a constant, not 0, times the other: then ``first = 0`` and ``second = 0`` say the same."""
    with _digits():
        pairs = _values(first, second)
        if any(is_zero(a) or is_zero(b) for a, b in pairs):
            return False
        return len(pairs) >= _POINTS // 2 and all(is_close(a / b, pairs[0][0] / pairs[0][1]) for a, b in pairs)


def order(first: Node, second: Node) -> int:
    """-1, 0 or 1 as the first constant is smaller, equal or larger. Raises: TooLarge, Undefined for what has no order."""
    if first == second or equal(first, second):
        return 0
    signs = [_infinite(each) for each in (first, second)]
    if signs[0] or signs[1]:
        return -1 if signs[0] < signs[1] else 1
    if names_in(first) or names_in(second):
        raise Undefined("variables have no order")
    with _digits():
        pairs = _values(first, second)
        if not all(is_real(value) for pair in pairs for value in pair):
            raise Undefined("complex numbers have no order")
        for a, b in pairs:
            return -1 if a.real < b.real else 1
    raise Undefined("it has no value")


def _digits() -> AbstractContextManager[Any]:
    import mpmath

    found: AbstractContextManager[Any] = mpmath.workdps(DIGITS)
    return found


def _infinite(node: Node) -> int:
    if node == Name("\\infty"):
        return 1
    return -1 if node == Operation("-", (Name("\\infty"),)) else 0


def _values(first: Node, second: Node) -> list[tuple[Any, Any]]:
    """The values of both at each point where both have one. Raises: TooLarge."""
    import mpmath

    if _has_infinity(first) or _has_infinity(second):
        return []
    names = sorted(names_in(first) | names_in(second))
    found: list[tuple[Any, Any]] = []
    for number in range(_POINTS if names else 1):
        point = {name: coordinate(name, number) for name in names}
        try:
            found.append((value_at(first, point), value_at(second, point)))
        except (Undefined, ZeroDivisionError, ValueError):
            # It is a pole of one of them, or outside of what it is defined for.
            continue
        except (OverflowError, MemoryError, mpmath.libmp.NoConvergence) as error:
            raise TooLarge(str(error)) from error
    return found


def _has_infinity(node: Node) -> bool:
    if isinstance(node, Name):
        return node.name == "\\infty"
    return isinstance(node, Operation) and any(_has_infinity(part) for part in node.parts)


def _agree(pairs: list[tuple[Any, Any]]) -> bool:
    # Of a complex number, roots and logarithms have several values: those count only if there are no real ones.
    real = [(a, b) for a, b in pairs if is_real(a) and is_real(b)]
    compared = real or [(a, b) for a, b in pairs if not (is_real(a) or is_real(b))]
    return bool(compared) and all(is_close(a, b) for a, b in compared)
