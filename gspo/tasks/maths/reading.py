"""Reads an answer as what it is: a number or an expression with its unit, several of them, an interval, and so on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, TypeAlias

from gspo.tasks.maths.expression import Node, Number, Operation, Unreadable, read_expression
from gspo.tasks.maths.spelling import spelled, squeezed, words_of
from gspo.tasks.maths.splitting import BRACKETS, pieces_at_top, split
from gspo.tasks.maths.units import measured

Separator = Literal[",", ";", "or", "and"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """An expression and its unit."""

    text: str
    node: Node
    unit: str = ""
    """As ``TakenOff.unit``; "base 8" for a number with an index."""


@dataclass(frozen=True, slots=True)
class Words:
    """What is no mathematics to this reader. Only the same words are equal."""

    text: str

    @property
    def key(self) -> str:
        return words_of(self.text)


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers in no order, as ``1, -2`` or ``x = 1 or x = -2``; with ``is_set`` in braces."""

    items: tuple[Reading, ...]
    is_set: bool = False
    separator: Separator = ","


@dataclass(frozen=True, slots=True)
class Bracketed:
    """A point, a vector or an interval: items in their order."""

    left: str
    right: str
    items: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """``3:4``, or a time of the day."""

    items: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """Intervals and sets joined."""

    items: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """``x = 5``, ``-2 < x \\le 7``, ``x \\in [1, 2]``: items with a sign between two."""

    items: tuple[Reading, ...]
    signs: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Reading, ...], ...]


Reading: TypeAlias = "Quantity | Words | Several | Bracketed | Ratio | Union | Relation | Matrix"

MOST_DEPTH: Final = 12
_SIGNS: Final = {"=": "=", "<": "<", ">": ">", "\\le": "\\le", "\\ge": "\\ge", "\\ne": "\\ne", "\\in": "\\in"}
_MATRIX: Final = re.compile(
    r"(?P<left>[(\[]?)\s*\\begin\s*\{(?P<kind>[pbB]?(?:small)?matrix|array)\}(?P<columns>\{[lcr| ]*\})?"
    r"(?P<cells>.*)\\end\s*\{(?P=kind)\}\s*(?P<right>[)\]]?)",
    re.DOTALL,
)
_THOUSANDS: Final = re.compile(r"[+-]?\s*(?:\\\$\s*)?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")
_CHOICE: Final = re.compile(r"\"?\s*\(?\s*\"?\s*([A-Z])\s*\"?\s*\)?\s*\"?")
_MORE: Final = re.compile(r"\s*(?:\"\s*\(?([A-Z])[).:]\s*\"|\(([A-Z])\)(?=\s+[^-+*/^=\s]))(.+)")


def read(text: str) -> Reading:
    """What ``text`` says. Raises: Unreadable when it says nothing."""
    return read_spelled(spelled(text))


def read_spelled(text: str, depth: int = 0) -> Reading:
    """As ``read``, of what is ``spelled`` already."""
    text = text.strip()
    if not re.search(r"[A-Za-z0-9]|\\emptyset|\\\{\s*\\\}", text):
        raise Unreadable("it says nothing")
    if depth > MOST_DEPTH:
        return Words(text)
    try:
        return _structure(text, depth)
    except Unreadable:
        return Words(text)


def _structure(text: str, depth: int) -> Reading:
    if _CHOICE.fullmatch(text) and ("(" in text or '"' in text):
        return Words(text)
    if _THOUSANDS.fullmatch(text):
        return quantity(text)
    text = _approximated(text)
    for separators in ((";",), ("or",), (",", "and")):
        parts = split(text, separators)
        if len(parts) > 1:
            return _several(parts, separators[0], depth)
    signs = [sign for _, sign in pieces_at_top(text) if sign in _SIGNS]
    if signs:
        texts = tuple(part.strip() for part in split(text, tuple(_SIGNS)))
        if not all(texts):
            raise Unreadable("a relation lacks a side")
        return Relation(tuple(read_spelled(part, depth + 1) for part in texts), tuple(signs), texts)
    unions = split(text, ("\\cup",))
    if len(unions) > 1:
        return Union(tuple(read_spelled(part, depth + 1) for part in unions))
    if found := _MATRIX.fullmatch(text):
        return _matrix(found["cells"], depth)
    if (bracketed := _bracketed(text, depth)) is not None:
        return bracketed
    if re.fullmatch(r"[A-Z]\s*\(.*,.*\)", text):
        # A point with its name: P(3, 4).
        return read_spelled(text[1:], depth + 1)
    if "\\pm" in text or "\\mp" in text:
        return _both_signs(text, depth)
    ratio = split(text, (":",))
    if len(ratio) > 1:
        return Ratio(tuple(read_spelled(part, depth + 1) for part in ratio))
    return quantity(text)


def quantity(text: str) -> Reading:
    """One number or expression with its unit, or words."""
    if found := re.fullmatch(r"(\d+)\s*_\s*\{?\s*\(?\s*\"?(\w+)\"?\s*\)?\s*\}?", text):
        base = _BASES.get(found[2], found[2])
        return Quantity(text, Number(Fraction(int(found[1]))), f"base {base}")
    plain = text.strip('"').strip()
    if '"' in text and '"' not in plain and not re.search(r"\d", plain):
        return Words(text)
    if _BARE_WORDS.fullmatch(text):
        return Words(text)
    found_unit = measured(text)
    node = _number(found_unit.rest) or read_expression(found_unit.rest)
    if found_unit.zeros:
        node = Operation("*", (node, Number(Fraction(10**found_unit.zeros))))
    return Quantity(text, node, found_unit.unit)


_BARE_WORDS: Final = re.compile(
    r"(?!(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)[\s(])"
    r"(?:[A-Za-z]{4,}(?:[ '-]+[A-Za-z]+)*|[A-Za-z]{2,}(?:[ '-]+[A-Za-z]{2,})+)"
)
_BASES: Final = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
    "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def _number(text: str) -> Node | None:
    """Spellings of numbers that are no expressions: 1 000, 3 1/2, 1.5e3, 0.\\overline{3}."""
    text = text.strip()
    if re.fullmatch(r"[+-]?\s*\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        return Number(Fraction(text.replace(" ", "")))
    if re.fullmatch(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,3}", text):
        return Number(Fraction(text))
    if found := re.fullmatch(r"([+-]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)", text):
        if not int(found[4]):
            raise Unreadable("a division by 0")
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return Number(-value if found[1] == "-" else value)
    if found := re.fullmatch(r"([+-]?)\s*(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?", text):
        fixed, repeated = found[3], found[4]
        value = Fraction(int(found[2] + fixed or "0"), 10 ** len(fixed))
        value += Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
        return Number(-value if found[1] == "-" else value)
    return None


def _several(parts: list[str], separator: str, depth: int) -> Reading:
    texts = [part.strip() for part in parts]
    # "1, 2, and 3" has an empty place between comma and word.
    texts = [text for place, text in enumerate(texts) if text or place == len(texts) - 1]
    if len(texts) < 2 or not all(texts):
        raise Unreadable("a list has an empty place")
    items: list[Reading] = []
    for text in texts:
        item = read_spelled(text, depth + 1)
        items += item.items if isinstance(item, Several) and not item.is_set else [item]
    kind: Separator = "or" if separator == "or" else ";" if separator == ";" else ","
    return Several(tuple(items), separator=kind)


def _bracketed(text: str, depth: int) -> Reading | None:
    """None for what is not all in one pair of brackets."""
    left = next((mark for mark in ("\\langle", "\\{", "(", "[") if text.startswith(mark)), "")
    right = next((mark for mark in ("\\rangle", "\\}", ")", "]") if text.endswith(mark)), "")
    is_pair = left and right and (left in "([") == (right in ")]")
    if not is_pair or (left not in "([" and right != BRACKETS[left]):
        return None
    inside = text[len(left) : len(text) - len(right)]
    try:
        parts = split(inside, (",", ";"))
    except Unreadable:
        return None
    if left == "\\{":
        return _set(inside, parts, depth)
    if len(parts) == 1:
        return None if left != "(" or right != ")" else _inner(inside, depth)
    if not all(part.strip() for part in parts):
        raise Unreadable("a list has an empty place")
    return Bracketed(
        left.replace("\\langle", "("), right.replace("\\rangle", ")"), tuple(read_spelled(part, depth + 1) for part in parts)
    )


def _inner(inside: str, depth: int) -> Reading | None:
    """What a needless pair of brackets holds; a single quantity is left as it stands."""
    found = read_spelled(inside, depth + 1)
    return None if isinstance(found, (Quantity, Words)) else found


def _set(inside: str, parts: list[str], depth: int) -> Reading:
    if not inside.strip():
        return Words("\\emptyset")
    if "|" in inside or ":" in inside:
        return _by_condition(inside, depth)
    items: list[Reading] = []
    for part in parts:
        item = read_spelled(part, depth + 1)
        items += item.items if isinstance(item, Several) and not item.is_set else [item]
    return Several(tuple(items), is_set=True)


def _by_condition(inside: str, depth: int) -> Reading:
    """``\\{x : x < 3\\}`` is the inequality."""
    parts = split(inside, ("|", ":"))
    if len(parts) == 2 and re.fullmatch(r"\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{\s*R\s*\}\s*)?", parts[0]):
        condition = read_spelled(parts[1], depth + 1)
        if isinstance(condition, Relation) and set(condition.signs) <= {"<", ">", "\\le", "\\ge", "\\ne"}:
            return condition
    raise Unreadable("a set by its condition")


def _both_signs(text: str, depth: int) -> Reading:
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return Several((read_spelled(upper, depth + 1), read_spelled(lower, depth + 1)))


def _matrix(inside: str, depth: int) -> Reading:
    texts = [row for row in re.split(r"\\\\", inside) if row.strip()]
    rows = tuple(tuple(read_spelled(cell, depth + 1) for cell in row.split("&")) for row in texts)
    if not rows or len({len(row) for row in rows}) != 1:
        raise Unreadable("its rows differ in length")
    return Matrix(rows)


def _approximated(text: str) -> str:
    """What stands before an approximation; the exact value counts."""
    parts = [part.strip() for part in split(text, ("\\approx",))]
    return next((part for part in parts if part), text)


def choice_in(text: str) -> tuple[str, str]:
    """The letter of a choice such as (B), and what stands beside it; ("", "") for what is none. ``text`` is ``spelled``."""
    if (found := _CHOICE.fullmatch(text)) and ("(" in text or '"' in text):
        return found[1], ""
    if found := _MORE.fullmatch(text):
        return found[1] or found[2], found[3].strip()
    return "", ""


def is_same_spelling(first: str, second: str) -> bool:
    """Whether two spelled texts are the same but for blanks."""
    return squeezed(first) == squeezed(second)
