"""Exact numbers: the fraction that an expression is. Each operation has a bound."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from gspo.tasks.maths.expression import Name, Node, Number

MOST_BITS: Final = 40_000
"""Of an exact number on the way."""
MOST_FACTORIAL: Final = 3_000
MOST_TOP: Final = 10**9
"""Of a binomial coefficient."""


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
