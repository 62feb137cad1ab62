"""The value of an expression at a point, to 120 digits, by mpmath. Each operation has a bound."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache
from typing import Any, Final

from gspo.tasks.maths.exact import TooLarge, Undefined, exact
from gspo.tasks.maths.expression import Name, Node, Number, Operation

DIGITS: Final = 120
_AGREE: Final = 90
"""Decimal places in which equal values agree; the others are for rounding."""
MOST_EXPONENT: Final = 100_000.0
"""A value above e to this, or below its inverse, is too large."""


@cache
def coordinate(name: str, number: int) -> Any:
    """Odd points are positive, between 0 and 1 or above; the others have any sign, and tell |x| from x."""
    import mpmath

    rng = random.Random(f"{name} {number}")
    size = rng.randrange(1, 10**30)
    with mpmath.workdps(DIGITS):
        value = mpmath.mpf(size) / 10**30 if number % 4 == 1 else 1 + mpmath.mpf(4 * size) / 10**30
        return value if number % 2 or rng.random() < 0.3 else -value


def is_real(value: Any) -> bool:
    return bool(abs(value.imag) <= abs(value) * _small() + _small())


def is_zero(value: Any) -> bool:
    return bool(abs(value) <= _small())


def is_close(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _small() + _small())


@cache
def _small() -> Any:
    import mpmath

    with mpmath.workdps(DIGITS):
        return mpmath.mpf(10) ** -_AGREE


def value_at(node: Node, point: dict[str, Any]) -> Any:
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
    exponent = exact(node.parts[1]) if node.kind == "^" else None
    if exponent is not None and exponent.denominator % 2 and exponent.denominator > 1:
        # Of a negative number, x^{1/3} is real.
        return _odd_root_power(value_at(node.parts[0], point), exponent)
    in_degrees = node.kind in _CIRCULAR
    parts = [value_at(_radians(part) if in_degrees else part, point) for part in node.parts]
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
            if is_zero(parts[1]):
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
        if is_zero(first):
            raise Undefined("a logarithm of 0")
        if len(parts) == 2:
            return mpmath.log(first) / mpmath.log(parts[1])
        # Some write log for base 10, some for base e: it is a base of its own, equal to neither.
        base = {"ln": mpmath.e, "lg": mpmath.mpf(10), "log": coordinate("the base of a logarithm", 2) ** 2 + 2}[kind]
        return mpmath.log(first) / mpmath.log(base)
    _require_size(first)
    if kind in _POLES and is_zero(getattr(mpmath, _POLES[kind])(first)):
        raise Undefined("it is infinite")
    names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
    return getattr(mpmath, names.get(kind, kind))(first)


def _require_size(value: Any) -> None:
    if abs(value) > MOST_EXPONENT:
        raise TooLarge("an argument is too large")


def _power(base: Any, exponent: Any) -> Any:
    import mpmath

    if is_zero(base):
        if exponent.real <= 0:
            raise Undefined("0 to the power 0, or of less")
        return mpmath.mpf(0)
    if abs(exponent) > MOST_EXPONENT or abs(exponent * mpmath.log(base)) > MOST_EXPONENT:
        raise TooLarge("a power is too large")
    return mpmath.power(base, exponent)


def _odd_root_power(base: Any, exponent: Fraction) -> Any:
    import mpmath

    power = mpmath.mpf(exponent.numerator) / exponent.denominator
    if not (is_real(base) and base.real < 0):
        return _power(base, power)
    value = _power(-base.real, power)
    return -value if exponent.numerator % 2 else value


def _root(value: Any, degree: Any) -> Any:
    """The real root of a negative number where the degree is odd."""
    import mpmath

    if is_zero(degree):
        raise Undefined("a root of degree 0")
    if is_zero(value):
        return mpmath.mpf(0)
    whole = mpmath.nint(degree.real)
    is_odd = is_close(degree, whole) and int(whole) % 2 == 1
    if is_odd and is_real(value) and value.real < 0:
        return -_power(-value.real, 1 / degree)
    return _power(value, 1 / degree)


def _whole(kind: str, value: Any) -> Any:
    import mpmath

    if not is_real(value):
        raise Undefined("a complex number is not rounded")
    nearest = mpmath.nint(value.real)
    if is_close(nearest, value):
        return nearest
    return mpmath.floor(value.real) if kind == "floor" else mpmath.ceil(value.real)
