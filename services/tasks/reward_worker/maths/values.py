"""Whether two expressions are equal: as fractions, or by their values at points drawn once for all, to 100 digits.

Nothing here simplifies, so nothing can run for ever: each operation has a bound, and what is above it is ``TooLarge``. Two
expressions that agree at every point are equal but for a chance far below that of a damaged bit (Schwartz 1980).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any, Final

from gspo_services.tasks.reward_worker.maths.expression import Name, Node, Number, Operation

DIGITS: Final = 120
_AGREE: Final = 90
"""Decimal places in which equal values agree; the others are for rounding."""
MOST_BITS: Final = 40_000
"""Of an exact number on the way."""
MOST_EXPONENT: Final = 100_000.0
"""A value above e to this, or below its inverse, is too large."""
MOST_FACTORIAL: Final = 3_000
MOST_TOP: Final = 10**9
"""Of a binomial coefficient."""
_POINTS: Final = 8
_CONSTANTS: Final = ("\\pi", "e", "i", "\\infty")


class TooLarge(ArithmeticError):
    """A value that no answer needs."""


class Undefined(ArithmeticError):
    """There is no value, as of 1/0."""


def exact(node: Node) -> Fraction | None:
    """The number that ``node`` is, where fractions can say it. Raises: TooLarge, Undefined."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return None
    parts = [exact(part) for part in node.parts]
    if any(part is None for part in parts):
        return None
    return _bounded(_exact_operation(node.kind, [part for part in parts if part is not None]))


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
    return _agree([(a, b) for a, b in _values(first, second)])


def proportional(first: Node, second: Node) -> bool:
    """Whether one is a constant, not 0, times the other: then ``first = 0`` and ``second = 0`` say the same."""
    import mpmath

    quotients: list[Any] = []
    for a, b in _values(first, second):
        if _is_zero(a) or _is_zero(b):
            return False
        quotients.append(mpmath.mpf(0) + a / b)
    return len(quotients) >= 3 and all(_same(each, quotients[0]) for each in quotients)


def order(first: Node, second: Node) -> int:
    """-1, 0 or 1 as the first constant is smaller, equal or larger. Raises: TooLarge, Undefined for what has no order."""
    if first == second or equal(first, second):
        return 0
    signs = [_infinite(each) for each in (first, second)]
    if signs[0] or signs[1]:
        return -1 if signs[0] < signs[1] else 1
    if names_in(first) or names_in(second):
        raise Undefined("variables have no order")
    ((a, b),) = list(_values(first, second))[:1] or [(None, None)]
    if a is None or not (_is_real(a) and _is_real(b)):
        raise Undefined("complex numbers have no order")
    return -1 if a.real < b.real else 1


def _infinite(node: Node) -> int:
    if node == Name("\\infty"):
        return 1
    return -1 if node == Operation("-", (Name("\\infty"),)) else 0


def _values(first: Node, second: Node) -> Iterator[tuple[Any, Any]]:
    """The values of both at each point where both have one."""
    import mpmath

    for node in (first, second):
        if _has_infinity(node):
            return
    names = sorted(names_in(first) | names_in(second))
    with mpmath.workdps(DIGITS):
        for number in range(_POINTS if names else 1):
            point = {name: _coordinate(name, number) for name in names}
            try:
                yield _value(first, point), _value(second, point)
            except (Undefined, ZeroDivisionError, ValueError):
                # It is a pole of one of them, or outside of what it is defined for.
                continue
            except (OverflowError, MemoryError, mpmath.libmp.NoConvergence) as error:
                raise TooLarge(str(error)) from error


def _has_infinity(node: Node) -> bool:
    if isinstance(node, Name):
        return node.name == "\\infty"
    return isinstance(node, Operation) and any(_has_infinity(part) for part in node.parts)


@cache
def _coordinate(name: str, number: int) -> Any:
    """Odd points are positive, between 0 and 1 or above; the others have any sign, and tell |x| from x."""
    import mpmath

    rng = random.Random(f"{name} {number}")
    size = rng.randrange(1, 10**30)
    with mpmath.workdps(DIGITS):
        value = mpmath.mpf(size) / 10**30 if number % 4 == 1 else 1 + mpmath.mpf(4 * size) / 10**30
        return value if number % 2 or rng.random() < 0.3 else -value


def _agree(pairs: list[tuple[Any, Any]]) -> bool:
    # Of a complex number, roots and logarithms have several values: those count only if there are no real ones.
    real = [(a, b) for a, b in pairs if _is_real(a) and _is_real(b)]
    compared = real or [(a, b) for a, b in pairs if not (_is_real(a) or _is_real(b))]
    return bool(compared) and all(_same(a, b) for a, b in compared)


def _is_real(value: Any) -> bool:
    return bool(abs(value.imag) <= abs(value) * _small() + _small())


def _is_zero(value: Any) -> bool:
    return bool(abs(value) <= _small())


def _same(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _small() + _small())


@cache
def _small() -> Any:
    import mpmath

    with mpmath.workdps(DIGITS):
        return mpmath.mpf(10) ** -_AGREE


def _bounded(value: Fraction | None) -> Fraction | None:
    if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise TooLarge("a number is too large")
    return value


def _exact_operation(kind: str, parts: list[Fraction]) -> Fraction | None:
    first = parts[0]
    match kind:
        case "+":
            return sum(parts, Fraction())
        case "*":
            product = Fraction(1)
            for part in parts:
                product = _bounded(product * part) or Fraction()
            return product
        case "-":
            return -first
        case "/":
            if not parts[1]:
                raise Undefined("a division by 0")
            return first / parts[1]
        case "^":
            return _exact_power(first, parts[1])
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
        case "degrees":
            return first
    return _exact_count(kind, parts)


def _exact_count(kind: str, parts: list[Fraction]) -> Fraction | None:
    match kind:
        case "factorial":
            return Fraction(math.factorial(_counted(parts[0])))
        case "double factorial":
            return Fraction(math.prod(range(_counted(parts[0]), 0, -2)))
        case "binomial":
            top, bottom = _counted(parts[0], MOST_TOP), _counted(parts[1], MOST_TOP)
            _counted(Fraction(max(0, min(bottom, top - bottom))))
            return Fraction(math.comb(top, bottom))
    return None


def _counted(value: Fraction, most: int = MOST_FACTORIAL) -> int:
    if value.denominator != 1 or value < 0:
        raise Undefined("a factorial of no whole number")
    if value > most:
        raise TooLarge("a factorial is too large")
    return int(value)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    if not base:
        if exponent <= 0:
            raise Undefined("0 to the power 0, or of less")
        return base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > MOST_BITS:
        raise TooLarge("a power is too large")
    return base ** (int(exponent) if abs(base) != 1 else int(exponent) % 2)


def _value(node: Node, point: dict[str, Any]) -> Any:
    """A number of mpmath. Raises: TooLarge, Undefined, ZeroDivisionError, ValueError."""
    import mpmath

    if isinstance(node, Number):
        return mpmath.mpf(node.value.numerator) / node.value.denominator
    if isinstance(node, Name):
        match node.name:
            case "\\pi":
                return +mpmath.pi
            case "e":
                return +mpmath.e
            case "i":
                return mpmath.mpc(0, 1)
        return point[node.name]
    if (
        node.kind == "^"
        and (exponent := exact(node.parts[1])) is not None
        and exponent.denominator % 2
        and exponent.denominator > 1
    ):
        # Of a negative number, x^{1/3} is real.
        return _odd_root_power(_value(node.parts[0], point), exponent)
    in_degrees = node.kind in _CIRCULAR
    parts = [_value(_radians(part) if in_degrees else part, point) for part in node.parts]
    value = _operation(node.kind, parts)
    if not mpmath.isfinite(value):
        raise Undefined("it is infinite")
    return value


_POLES: Final = {"tan": "cos", "sec": "cos", "cot": "sin", "csc": "sin"}
_CIRCULAR: Final = ("sin", "cos", "tan", "cot", "sec", "csc")


def _radians(node: Node) -> Node:
    """An angle in degrees by its length on the circle."""
    if not isinstance(node, Operation):
        return node
    parts = tuple(_radians(part) for part in node.parts)
    if node.kind == "degrees":
        return Operation("*", (*parts, Operation("/", (Name("\\pi"), Number(Fraction(180))))))
    return Operation(node.kind, parts)


def _operation(kind: str, parts: list[Any]) -> Any:
    import mpmath

    first = parts[0]
    match kind:
        case "+":
            return mpmath.fsum(parts)
        case "*":
            return mpmath.fprod(parts)
        case "-":
            return -first
        case "/":
            if _is_zero(parts[1]):
                raise Undefined("a division by 0")
            return first / parts[1]
        case "^":
            return _power(first, parts[1])
        case "root":
            return _root(first, parts[1])
        case "abs":
            return abs(first)
        case "floor" | "ceil":
            return _whole(kind, first)
        case "degrees":
            return first
        case "factorial":
            _require_size(first)
            return mpmath.gamma(first + 1)
        case "double factorial":
            _require_size(first)
            return mpmath.fac2(first)
        case "binomial":
            _require_size(first)
            _require_size(parts[1])
            return mpmath.binomial(first, parts[1])
    return _function(kind, parts)


def _function(kind: str, parts: list[Any]) -> Any:
    import mpmath

    first = parts[0]
    if kind in ("ln", "log", "lg"):
        if _is_zero(first):
            raise Undefined("a logarithm of 0")
        if len(parts) == 2:
            return mpmath.log(first) / mpmath.log(parts[1])
        # Some write log for base 10, some for base e: it is a base of its own, equal to neither.
        base = {"ln": mpmath.e, "lg": mpmath.mpf(10), "log": _coordinate("the base of a logarithm", 2) ** 2 + 2}[kind]
        return mpmath.log(first) / mpmath.log(base)
    _require_size(first)
    if kind in _POLES and _is_zero(getattr(mpmath, _POLES[kind])(first)):
        raise Undefined("it is infinite")
    names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
    return getattr(mpmath, names.get(kind, kind))(first)


def _require_size(value: Any) -> None:
    if abs(value) > MOST_EXPONENT:
        raise TooLarge("an argument is too large")


def _power(base: Any, exponent: Any) -> Any:
    import mpmath

    if _is_zero(base):
        if exponent.real <= 0:
            raise Undefined("0 to the power 0, or of less")
        return mpmath.mpf(0)
    if abs(exponent) > MOST_EXPONENT or abs(exponent * mpmath.log(base)) > MOST_EXPONENT:
        raise TooLarge("a power is too large")
    return mpmath.power(base, exponent)


def _odd_root_power(base: Any, exponent: Fraction) -> Any:
    import mpmath

    power = mpmath.mpf(exponent.numerator) / exponent.denominator
    if not (_is_real(base) and base.real < 0):
        return _power(base, power)
    value = _power(-base.real, power)
    return -value if exponent.numerator % 2 else value


def _root(value: Any, degree: Any) -> Any:
    """The real root of a negative number where the degree is odd."""
    import mpmath

    if _is_zero(degree):
        raise Undefined("a root of degree 0")
    if _is_zero(value):
        return mpmath.mpf(0)
    if _is_real(value) and value.real < 0 and _same(degree, mpmath.nint(degree.real)) and int(mpmath.nint(degree.real)) % 2:
        return -_power(-value.real, 1 / degree)
    return _power(value, 1 / degree)


def _whole(kind: str, value: Any) -> Any:
    import mpmath

    if not _is_real(value):
        raise Undefined("a complex number is not rounded")
    nearest = mpmath.nint(value.real)
    if _same(nearest, value):
        return nearest
    return mpmath.floor(value.real) if kind == "floor" else mpmath.ceil(value.real)
