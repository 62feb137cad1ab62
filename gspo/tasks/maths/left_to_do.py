"""Whether an answer leaves arithmetic to do: a problem that is said again would be its own answer.

A policy finds that out. Asked for 15 - 43, one of 135 million parameters learned within sixty batches to say "15 - 43".
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gspo.tasks.maths.comparison import stated_value
from gspo.tasks.maths.exact import exact
from gspo.tasks.maths.expression import Node, Number, Operation
from gspo.tasks.maths.reading import Quantity, Relation, read_spelled


def is_finished(text: str) -> bool:
    """Whether ``text``, which is ``spelled``, is one number as numbers are written, or ends with it, as 15 - 43 = -28 does.

    A sum, product or whole quotient of numbers is none; a fraction, a mixed number and a power of ten are. Raises:
    Unreadable, ArithmeticError.
    """
    reading = read_spelled(text)
    value = stated_value(reading) if isinstance(reading, Relation) else reading
    return isinstance(value, Quantity) and exact(value.node) is not None and not _leaves_work(value.node)


def _leaves_work(node: Node) -> bool:
    if not isinstance(node, Operation):
        return False
    return not _is_spelling(node) or any(map(_leaves_work, node.parts))


def _is_spelling(node: Operation) -> bool:
    match node.kind:
        case "-":
            return True
        case "+":
            return _is_mixed(node.parts)
        case "*":
            return len(node.parts) == 2 and _is_power_of_ten(node.parts[1])
        case "/":
            value = exact(node)
            return value is not None and value.denominator != 1
    return _is_power_of_ten(node)


def _is_mixed(parts: Sequence[Node]) -> bool:
    """2\\frac{1}{2} is read as a sum."""
    if len(parts) != 2 or not isinstance(parts[0], Number):
        return False
    part = exact(parts[1])
    is_fraction = isinstance(parts[1], Operation) and parts[1].kind == "/" and part is not None and 0 < part < 1
    return parts[0].value.denominator == 1 and is_fraction


def _is_power_of_ten(node: Node) -> bool:
    return isinstance(node, Operation) and node.kind == "^" and node.parts[0] == Number(Fraction(10))
