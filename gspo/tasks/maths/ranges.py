"""Sets of numbers: inequalities, intervals and their unions are ranges, and two sets are the same if their ranges are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gspo.tasks.maths import values
from gspo.tasks.maths.exact import Undefined
from gspo.tasks.maths.expression import Name, Node, Operation
from gspo.tasks.maths.reading import Bracketed, Quantity, Reading, Relation, Several, Union

_NAME: Final = re.compile(r"\"?\\?[A-Za-z]+\"?(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()=]*\))?")
_FLIPPED: Final = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


class NumberRange(NamedTuple):
    """Ends, and whether each belongs to it."""

    left: Node
    has_left: bool
    right: Node
    has_right: bool


_INFINITY: Final = Name("\\infty")


def same_ranges(gold: Reading, said: Reading) -> bool:
    """Whether both are sets of numbers, and the same. Raises: TooLarge."""
    names = {name for each in (gold, said) if (name := _variable(each))}
    one, other = _ranges(gold), _ranges(said)
    if len(names) > 1 or one is None or other is None:
        return False
    one, other = _joined(one), _joined(other)
    return len(one) == len(other) and all(
        (a.has_left, a.has_right) == (b.has_left, b.has_right) and _equal(a.left, b.left) and _equal(a.right, b.right)
        for a, b in zip(one, other, strict=True)
    )


def is_name(text: str) -> bool:
    """Whether ``text``, which is ``spelled``, is what a value may be given to: x, \\theta, f(2), (x, y)."""
    return _NAME.fullmatch(text.strip()) is not None or re.fullmatch(r"\([A-Za-z\\, ]+\)", text.strip()) is not None


def _equal(one: Node, other: Node) -> bool:
    return one == other or values.equal(one, other)


def _variable(reading: Reading) -> str:
    """The variable that an inequality is about; "" for none."""
    if isinstance(reading, Several):
        return next((name for each in reading.items if (name := _variable(each))), "")
    if not isinstance(reading, Relation):
        return ""
    return next((text for text in reading.texts if is_name(text)), "").strip()


def _ranges(reading: Reading) -> list[NumberRange] | None:
    """The set as intervals; None for what is none."""
    match reading:
        case Union():
            return _all_ranges(reading.items)
        case Several(separator="or") | Several(separator=","):
            if reading.is_set or not all(isinstance(each, Relation) for each in reading.items):
                points = [each for each in reading.items if isinstance(each, Quantity) and reading.is_set]
                return (
                    [NumberRange(each.node, True, each.node, True) for each in points]
                    if len(points) == len(reading.items)
                    else None
                )
            return _all_ranges(reading.items)
        case Bracketed(items=(Quantity() as left, Quantity() as right)):
            return [NumberRange(left.node, reading.left == "[", right.node, reading.right == "]")]
        case Relation():
            return _solved(reading)
        case Quantity(node=Name(name="\\mathbb{R}")):
            return [NumberRange(Operation("-", (_INFINITY,)), False, _INFINITY, False)]
    return None


def _all_ranges(items: Sequence[Reading]) -> list[NumberRange] | None:
    found = [_ranges(item) for item in items]
    return None if any(each is None for each in found) else [interval for each in found if each for interval in each]


def _solved(relation: Relation) -> list[NumberRange] | None:
    if relation.signs == ("\\in",):
        return _ranges(relation.items[1])
    nodes = [each.node if isinstance(each, Quantity) else None for each in relation.items]
    if any(node is None for node in nodes):
        return None
    signs, sides = list(relation.signs), [node for node in nodes if node is not None]
    if len(sides) == 2 and is_name(relation.texts[0]) and signs[0] == "\\ne":
        low, high = Operation("-", (_INFINITY,)), _INFINITY
        return [NumberRange(low, False, sides[1], False), NumberRange(sides[1], False, high, False)]
    if not set(signs) <= set(_FLIPPED):
        return None
    if signs[0] in (">", "\\ge"):
        signs, sides = [_FLIPPED.get(sign, sign) for sign in reversed(signs)], sides[::-1]
    texts = list(relation.texts) if signs == list(relation.signs) else list(relation.texts)[::-1]
    if not set(signs) <= {"<", "\\le"}:
        return None
    if len(sides) == 3 and is_name(texts[1]):
        return [NumberRange(sides[0], signs[0] == "\\le", sides[2], signs[1] == "\\le")]
    if len(sides) == 2 and is_name(texts[0]):
        return [NumberRange(Operation("-", (_INFINITY,)), False, sides[1], signs[0] == "\\le")]
    if len(sides) == 2 and is_name(texts[1]):
        return [NumberRange(sides[0], signs[0] == "\\le", _INFINITY, False)]
    return None


def _joined(intervals: list[NumberRange]) -> list[NumberRange]:
    """In their order, and as few as there may be; as they are where ends cannot be ordered."""
    if len(intervals) < 2:
        return intervals
    try:
        ordered = _sorted(intervals, values.order)
    except Undefined:
        return intervals
    found = [ordered[0]]
    for each in ordered[1:]:
        last = found[-1]
        gap = values.order(last.right, each.left)
        if gap < 0 or (gap == 0 and not (last.has_right or each.has_left)):
            found.append(each)
            continue
        further = values.order(last.right, each.right)
        has_right = each.has_right if further < 0 else last.has_right if further > 0 else last.has_right or each.has_right
        found[-1] = last._replace(right=each.right if further < 0 else last.right, has_right=has_right)
    return found


def _sorted(intervals: list[NumberRange], order: Callable[[Node, Node], int]) -> list[NumberRange]:
    found: list[NumberRange] = []
    for each in intervals:
        place = next((index for index, other in enumerate(found) if order(each.left, other.left) < 0), len(found))
        found.insert(place, each)
    return found
