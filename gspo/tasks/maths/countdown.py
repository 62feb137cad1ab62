"""Countdown: arithmetic of given numbers, each used once, that makes a target. The gold is "98 = 44, 19, 35"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from gspo.tasks.maths.exact import exact
from gspo.tasks.maths.expression import Node, Number, Operation, Unreadable, read_expression
from gspo.tasks.maths.spelling import spelled

_GOLD: Final = re.compile(r"(-?\d+) = (-?\d+(?:, -?\d+)*)")


def countdown_gold(target: int, numbers: Sequence[int]) -> str:
    """The gold of a target and its numbers."""
    return f"{target} = {', '.join(map(str, numbers))}"


def is_countdown(gold: str) -> bool:
    """Whether ``gold`` is written as ``countdown_gold`` does."""
    return _GOLD.fullmatch(gold) is not None


def makes_target(gold: str, said: str) -> bool:
    """Whether ``said``, as ``(44 + 19) + 35`` or ``44 + 19 + 35 = 98``, uses each number once and makes the target.

    Raises: Unreadable, ArithmeticError for what is no arithmetic.
    """
    found = _GOLD.fullmatch(gold)
    if found is None:
        raise Unreadable("it is no target with its numbers")
    target, numbers = int(found[1]), sorted(map(int, found[2].split(", ")))
    arithmetic, *results = spelled(said).split("=")
    if any(exact(read_expression(result)) != target for result in results):
        return False
    node = read_expression(arithmetic)
    return sorted(_numbers(node)) == numbers and exact(node) == target


def _numbers(node: Node) -> list[Fraction]:
    if isinstance(node, Number):
        return [node.value]
    if isinstance(node, Operation) and node.kind in ("+", "-", "*", "/"):
        return [number for part in node.parts for number in _numbers(part)]
    raise Unreadable("only + - * / are allowed")
