"""Whether what the policy said is the answer of the row. The decisions by kind: docs/guide/programs.md, "Mathematics"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, NamedTuple

from gspo.tasks.maths import values
from gspo.tasks.maths.dates import day_in
from gspo.tasks.maths.expression import Name, Node, Number, Operation
from gspo.tasks.maths.ranges import is_name, same_ranges
from gspo.tasks.maths.reading import (
    Bracketed,
    Matrix,
    Quantity,
    Ratio,
    Reading,
    Relation,
    Several,
    Union,
    Words,
    choice_in,
    is_same_spelling,
    read_spelled,
)
from gspo.tasks.maths.spelling import words_of

_LETTERS: Final = re.compile(r"[A-Za-z]+(?:[ '][A-Za-z]+)*|[A-Za-z]{2,}(?:[ '-]+[A-Za-z]+)*|[A-Z](?:-[A-Z]){2,}")
"""A word, words, or A-B-C; x-y is a difference."""
_FUNCTION: Final = re.compile(r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|lg|exp|sqrt)(?![A-Za-z])")
_CODE: Final = re.compile(r"\d+(?:-\d+)+|\d+(?:/\d+){2,}")
"""A result, a range or a code, as 98-95 and 1-2-3: a gold has no arithmetic left."""
_MARKED: Final = re.compile(r"\"?\(?([A-Za-z])\"?\s*[).:]\"?\s*(.+)", re.DOTALL)
_OTHER_MARK: Final = re.compile(r"\([A-Z]\)|\"[A-Z]\"|(?:^|[\s,;])[A-Z][).:](?:\s|$)|\b(?:or|and)\s+[A-Z]\b")
_EMPTY: Final = frozenset(
    ["emptyset", "no solution", "no solutions", "no real solution", "no real solutions", "empty set", "the empty set"]
)
_NOWHERE: Final = frozenset(["dne", "does not exist"])


class GoldRules(NamedTuple):
    """What a source says about its golds."""

    letters_multiply: bool = False
    """abc is a product, so that cab is the same; else letters alone are a word."""
    in_order: bool = False
    """Of several answers the order counts."""


def same(gold: str, said: str, rules: GoldRules = GoldRules()) -> bool:  # noqa: B008
    """Whether ``said`` is ``gold``; both are ``spelled``. Raises: Unreadable when one says nothing."""
    if is_same_spelling(gold, said):
        return True
    letter, rest = choice_in(gold)
    if letter:
        return _same_choice(letter, rest, said)
    if re.fullmatch(r"[A-Z]", gold) and lettered(said)[0] == gold:
        return True
    if (day := day_in(gold)) is not None:
        return day == day_in(said)
    golds, answers = _readings(gold), _readings(said)
    if not rules.letters_multiply:
        golds = [typed(each) for each in golds]
    if rules.in_order:
        return any(_in_their_order(one, other) for one in golds for other in answers)
    return any(_same(one, other) for one in golds for other in answers)


def _in_their_order(gold: Reading, said: Reading) -> bool:
    lists = [each.items if isinstance(each, (Several, Bracketed)) else None for each in (gold, said)]
    if lists[0] is None or lists[1] is None:
        return _same(gold, said)
    return _in_order(lists[0], lists[1])


def typed(gold: Reading) -> Reading:
    """``gold`` with its words and codes as such: ABC is no product, and 1-2-3 no difference."""
    match gold:
        case Quantity(text=text) if _LETTERS.fullmatch(text) and not _FUNCTION.search(text) and _num_letters(text) > 1:
            return Words(text)
        case Quantity(text=text) if is_code(text):
            return Words(text)
        case Several() | Bracketed() | Ratio() | Union() | Relation():
            return replace(gold, items=tuple(typed(each) for each in gold.items))
        case Matrix():
            return Matrix(tuple(tuple(typed(each) for each in row) for row in gold.rows))
    return gold


def is_code(text: str) -> bool:
    """Whether ``text`` is numbers that are not calculated with, such as 98-95 and 1-2-3."""
    return _CODE.fullmatch(text) is not None


def _num_letters(text: str) -> int:
    return len(re.sub(r"[^A-Za-z]", "", text))


def _readings(text: str) -> list[Reading]:
    """100,200 is a number, and may be a list."""
    found = [read_spelled(text)]
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+", text):
        found.append(Several(tuple(read_spelled(part) for part in text.split(","))))
    return found


def lettered(said: str) -> tuple[str, str]:
    """The letter that an answer chooses, and what it says beside it: B, (b), "Option B", (B) 12, B. 12.

    ("", "") for one that chooses none, or two. ``said`` is ``spelled``.
    """
    said = re.sub(r"^\W*(?:option|choice|answer)\b\W*", "", said, flags=re.IGNORECASE)
    letter, beside = choice_in(said)
    if not letter and (bare := re.fullmatch(r"\(?\s*([A-Za-z])\s*\)?\"?", said)):
        letter = bare[1].upper()
    if not letter and (marked := _MARKED.fullmatch(said)):
        letter, beside = marked[1].upper(), marked[2]
    return ("", "") if _OTHER_MARK.search(beside) else (letter, beside)


def _same_choice(letter: str, rest: str, said: str) -> bool:
    """``(B)`` is said as B, as (B), and as (B) with what stands beside it."""
    chosen, beside = lettered(said)
    if chosen:
        return chosen == letter
    return bool(rest) and not beside and not _OTHER_MARK.search(said) and same(rest, said)


def _same_set(gold: Reading, said: Reading) -> bool:
    if isinstance(gold, Union) and isinstance(said, Union) and _in_any_order(gold.items, said.items):
        return True
    return same_ranges(gold, said)


def _same(gold: Reading, said: Reading) -> bool:
    if isinstance(gold, Relation) or isinstance(said, Relation):
        return _same_relation(gold, said)
    if isinstance(gold, Words) or isinstance(said, Words):
        return _same_words(gold, said) or _same_set(gold, said)
    if isinstance(gold, Quantity) and isinstance(said, Quantity):
        return _same_quantity(gold, said)
    if isinstance(gold, Matrix) and isinstance(said, Matrix):
        return len(gold.rows) == len(said.rows) and all(
            _in_order(one, other) for one, other in zip(gold.rows, said.rows, strict=True)
        )
    if isinstance(gold, Ratio) and isinstance(said, Ratio):
        return _in_order(gold.items, said.items)
    if isinstance(gold, Union) or isinstance(said, Union):
        return _same_set(gold, said)
    return _same_items(gold, said)


def _same_items(gold: Reading, said: Reading) -> bool:
    """Lists, sets, points and intervals."""
    if isinstance(gold, Several) and isinstance(said, Several):
        if gold.is_set or said.is_set:
            return _in_any_order(_distinct(gold.items), _distinct(said.items))
        if bool(_names_of(gold)) != bool(_names_of(said)):
            # a=2, b=3 is said in its order where the names are left out.
            return _in_order(gold.items, said.items)
        return _in_any_order(gold.items, said.items)
    if isinstance(gold, Bracketed) and isinstance(said, Bracketed):
        brackets = (gold.left, gold.right) == (said.left, said.right) or len(gold.items) > 2
        return brackets and _in_order(gold.items, said.items)
    for one, other in ((gold, said), (said, gold)):
        if isinstance(one, Bracketed) and isinstance(other, Several):
            is_list = (one.left, one.right) == ("(", ")") or len(one.items) > 2
            return is_list and not other.is_set and _in_order(_items_of(gold), _items_of(said))
        if isinstance(one, Several) and one.is_set and len(_distinct(one.items)) == 1 and isinstance(other, Quantity):
            return _same(one.items[0], other) if one is gold else _same(other, one.items[0])
    return _same_set(gold, said)


def _names_of(several: Several) -> set[str]:
    """The names whose values are listed, if each has a value of its own."""
    stated = [_stated(item) if isinstance(item, Relation) else None for item in several.items]
    names = {each.name for each in stated if each is not None and is_name(each.name)}
    return names if len(names) == len(several.items) else set()


def _items_of(reading: Reading) -> tuple[Reading, ...]:
    """The items of a list or a point."""
    return reading.items if isinstance(reading, (Several, Bracketed)) else (reading,)


def _in_order(gold: Sequence[Reading], said: Sequence[Reading]) -> bool:
    return len(gold) == len(said) and all(_same(one, other) for one, other in zip(gold, said, strict=True))


def _in_any_order(gold: Sequence[Reading], said: Sequence[Reading]) -> bool:
    if len(gold) != len(said):
        return False
    left = list(said)
    for one in gold:
        found = next((place for place, other in enumerate(left) if _same(one, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _distinct(items: Sequence[Reading]) -> list[Reading]:
    found: list[Reading] = []
    for item in items:
        if not any(_same(other, item) for other in found):
            found.append(item)
    return found


def _same_words(gold: Reading, said: Reading) -> bool:
    texts = [each.text if isinstance(each, (Words, Quantity)) else "" for each in (gold, said)]
    one, other = (words_of(text) for text in texts)
    if not one or not other:
        return False
    if one == other:
        # Signs that are no letters must be the same: 5' is not 5, and -\mathbb{N} is not \mathbb{N}.
        plain = not any(is_symbolic(text) or re.search(r"\d", text) for text in texts)
        return plain or is_same_spelling(texts[0].lower(), texts[1].lower())
    if isinstance(gold, Words) and isinstance(said, Quantity) and _factors(said.node) == gold.text.replace(" ", ""):
        # The product a b is said as ab.
        return True
    return any(one in group and other in group for group in (_EMPTY, _NOWHERE))


def _factors(node: Node) -> str:
    """The letters of a product of variables, in their order; "" for anything else."""
    names = [node] if isinstance(node, Name) else node.parts if isinstance(node, Operation) and node.kind == "*" else ()
    return "".join(each.name if isinstance(each, Name) else _factors(each) or "?" for each in names)


def is_symbolic(text: str) -> bool:
    """Whether ``text`` has signs that words do not have."""
    return re.search(r"[\\^_+*/=<>|{}]|(?<![A-Za-z])-|-(?![A-Za-z])", text) is not None and "emptyset" not in text


def _same_quantity(gold: Quantity, said: Quantity) -> bool:
    bases = [each.unit.startswith("base ") for each in (gold, said)]
    if any(bases) and gold.unit != said.unit:
        return False
    if "%" in (gold.unit, said.unit):
        return _same_percentage(gold, said)
    if gold.unit and said.unit and gold.unit != said.unit:
        return False
    return _equal(gold.node, said.node)


def _same_percentage(gold: Quantity, said: Quantity) -> bool:
    """50 % is said as 50 %, as 50 and as 0.5, and says 50 and 0.5."""
    if any(each.unit not in ("", "%", "a word") for each in (gold, said)):
        return False
    if _equal(gold.node, said.node):
        return True
    hundredth = Number(Fraction(1, 100))
    one, other = (Operation("*", (each.node, hundredth)) if each.unit == "%" else each.node for each in (gold, said))
    return gold.unit != said.unit and _equal(one, other)


def _equal(one: Node, other: Node) -> bool:
    return one == other or values.equal(one, other)


def _same_relation(gold: Reading, said: Reading) -> bool:
    if isinstance(gold, Relation) and isinstance(said, Relation):
        return _same_relations(gold, said)
    if isinstance(gold, Relation):
        stated = _stated(gold)
        if stated is not None and is_name(stated.name):
            return _same(stated.value, said)
        return _same_set(gold, said)
    assert isinstance(said, Relation)
    stated = _stated(said)
    if stated is not None:
        return (is_name(stated.name) or not _is_nought(stated.value)) and _same(gold, stated.value)
    return _same_set(gold, said)


def _same_relations(gold: Relation, said: Relation) -> bool:
    one, other = _stated(gold), _stated(said)
    if one is not None and other is not None and is_name(one.name) and is_name(other.name):
        names = [re.sub(r"[\s{}\"]", "", each.name) for each in (one, other)]
        if names[0] == names[1]:
            return _same(one.value, other.value)
    if set(gold.signs) == set(said.signs) == {"="} and len(gold.items) == len(said.items) == 2:
        return _same_equation(gold, said)
    if gold.signs == said.signs and set(gold.signs) == {"\\ne"}:
        return _in_order(gold.items, said.items)
    return _same_set(gold, said)


class _Stated(NamedTuple):
    """``x = 5``."""

    name: str
    value: Reading


def _stated(relation: Relation) -> _Stated | None:
    """What an equation or a membership states of a name; None for any other, and for one that contradicts itself."""
    if relation.signs == ("\\in",):
        return _Stated(relation.texts[0], relation.items[1])
    if set(relation.signs) != {"="}:
        return None
    constants = [each for each in relation.items if isinstance(each, Quantity) and not values.names_in(each.node)]
    if any(not _equal(constants[0].node, each.node) for each in constants[1:]):
        return None
    if len(relation.items) == 2 and is_name(relation.texts[1]) and not is_name(relation.texts[0]):
        return _Stated(relation.texts[1], relation.items[0])
    is_equation = len(constants) < len(relation.items) and not is_name(relation.texts[0])
    if is_equation and (not constants or relation.items[-1] is not constants[-1]):
        return None
    return _Stated(relation.texts[0], relation.items[-1])


def stated_value(relation: Relation) -> Reading | None:
    """The value that an equation states, as -28 in 15 - 43 = -28; None where it states none."""
    stated = _stated(relation)
    return None if stated is None else stated.value


def _is_nought(reading: Reading) -> bool:
    """0 is on the right of every equation: a problem that is said again would be its own answer."""
    return isinstance(reading, Quantity) and not values.names_in(reading.node) and _equal(reading.node, Number(Fraction(0)))


def _same_equation(gold: Relation, said: Relation) -> bool:
    sides = [each.node for relation in (gold, said) for each in relation.items if isinstance(each, Quantity)]
    if len(sides) != 4:
        return _in_order(gold.items, said.items)
    one, other = (Operation("+", (left, Operation("-", (right,)))) for left, right in (sides[:2], sides[2:]))
    if not values.names_in(one) or not values.names_in(other):
        return False
    return values.proportional(one, other)
