"""What an answer of a data set is, and why it cannot be graded, without symbolic algebra: files have a hundred thousand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal

from gspo.tasks.maths import values
from gspo.tasks.maths.chosen import chosen
from gspo.tasks.maths.comparison import is_code, is_symbolic, same, typed
from gspo.tasks.maths.countdown import is_countdown
from gspo.tasks.maths.dates import day_in
from gspo.tasks.maths.exact import exact
from gspo.tasks.maths.expression import Unreadable
from gspo.tasks.maths.left_to_do import is_finished
from gspo.tasks.maths.plain_words import same_text
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
    read_spelled,
)
from gspo.tasks.maths.spelling import spelled, squeezed, words_of

GoldKind = Literal["number", "integer", "symbolic", "expression", "list", "text", "countdown"]
"""number: one that is said as a number: 15 - 43 is no -28. integer: a whole number, said in any way but as a percentage.
symbolic: whatever the reader knows, and what math-verify compares; letters alone are a word. expression: the same, and
letters are variables, so that ab is ba. list: the same as symbolic, and several answers are right in their order alone.
text: words, and numbers by value; no mathematics. countdown: any arithmetic of given numbers that makes a target."""
GoldForm = Literal[
    "number", "expression", "several", "interval", "equation", "matrix", "words", "choice", "date", "countdown",
    "beyond",
]  # fmt: skip
"""beyond: this reader does not know it, and math-verify compares it."""
MAX_ANSWER_CHARS: Final = 2_000
"""A longer one is no answer: reading it would only take time."""
_PLACEHOLDERS: Final = frozenset(["proof", "notfound", "not found", "n a", "nan", "null", "todo", "see solution", "unknown"])
"""What sets have in place of an answer."""
_PLAIN: Final = re.compile(r"-?\d{1,100}")
"""Most answers of most sets: there is nothing to find out."""


def fault_of(gold: str, kind: GoldKind, options: Sequence[str] = ()) -> str:
    """Why no answer can be right for ``gold``, with a way out; "" when one can: itself is.

    ``options``: see ``grade_answer``; a gold that names one of them has no fault, whatever the kind.
    """
    if options:
        return (
            "" if chosen(gold, options) is not None else f"its answer {gold[:100]!r} is none of its {len(options)} options"
        )
    return _fault_of(gold, kind)


@lru_cache(maxsize=4096)
def _fault_of(gold: str, kind: GoldKind) -> str:
    if _PLAIN.fullmatch(gold):
        return ""
    shown = repr(gold if len(gold) <= 100 else gold[:100] + "...")
    if len(gold) > MAX_ANSWER_CHARS:
        return f"its answer {shown} has {len(gold):,} characters, and an answer has at most {MAX_ANSWER_CHARS:,}"
    if kind == "text":
        return "" if same_text(gold, gold) else f"its answer {shown} says nothing: correct it"
    if kind == "countdown":
        return "" if is_countdown(gold) else f'its answer {shown} is no target with its numbers, as "98 = 44, 19, 35"'
    if not _closes(gold):
        return f"its answer {shown} has braces that do not match: nobody could put it into a box"
    if "####" in gold:
        return f"its answer {shown} has the mark #### in it, and not what follows it alone: name the mark in the options"
    wanted = spelled(gold)
    if words_of(wanted) in _PLACEHOLDERS:
        return (
            f"its answer {shown} stands for an answer that is not there: leave the row out, or give it a reward of its own"
        )
    try:
        if kind == "integer":
            if integer_in(gold) is None:
                return f'its answer is {shown}, not an integer; kind = "symbolic" compares expressions'
            return ""
        read_spelled(wanted)
        if kind == "number" and not is_finished(wanted):
            return f'its answer is {shown}, not a number; kind = "symbolic" compares expressions'
        if not same(wanted, spelled(wanted)):
            return f"its answer {shown} is not equal to itself: correct it"
    except Unreadable:
        return f"its answer {shown} says nothing: correct it"
    except (ArithmeticError, RecursionError):
        return ""
    return ""


def integer_in(text: str) -> int | None:
    """The integer that ``text`` is; None when it is anything else."""
    try:
        reading = read_spelled(spelled(text))
        if not isinstance(reading, Quantity) or reading.unit == "%" or reading.unit.startswith("base"):
            return None
        value = exact(reading.node)
    except (Unreadable, ArithmeticError, RecursionError):
        return None
    return int(value) if value is not None and value.denominator == 1 else None


@lru_cache(maxsize=4096)
def gold_kind(gold: str) -> GoldForm:
    """What ``gold``, which has no ``fault_of``, is read as."""
    if _PLAIN.fullmatch(gold):
        return "number"
    text = spelled(gold)
    if choice_in(text)[0]:
        return "choice"
    if day_in(text):
        return "date"
    try:
        return _form(typed(read_spelled(text)))
    except (Unreadable, RecursionError):
        return "beyond"


def _form(reading: Reading) -> GoldForm:
    parts = _parts(reading)
    if any(_form(part) == "beyond" for part in parts):
        return "beyond"
    match reading:
        case Words():
            return "beyond" if is_symbolic(reading.text) and not is_code(reading.text) else "words"
        case Quantity():
            return "expression" if values.names_in(reading.node) or re.search(r"\\|\^", reading.text) else "number"
        case Several() | Ratio():
            return "several"
        case Bracketed():
            return "several" if len(parts) > 2 else "interval"
        case Union():
            return "interval"
        case Relation():
            return "equation"
        case Matrix():
            return "matrix"


def _parts(reading: Reading) -> tuple[Reading, ...]:
    if isinstance(reading, (Several, Bracketed, Ratio, Union, Relation)):
        return reading.items
    return tuple(cell for row in reading.rows for cell in row) if isinstance(reading, Matrix) else ()


def vote_of(answer: str) -> str:
    """An answer as a vote: the number that it is, or its spelling without blanks."""
    said = spelled(answer)
    try:
        reading = read_spelled(said)
        if isinstance(reading, Quantity) and not reading.unit.startswith("base"):
            value = exact(reading.node)
            if value is not None:
                return f"{value}{'%' if reading.unit == '%' else ''}"
    except (Unreadable, ArithmeticError, RecursionError):
        pass
    return squeezed(said)


def is_same_vote(one: str, other: str) -> bool:
    """Whether two votes of one task are for the same answer."""
    try:
        return one == other or same(spelled(one), spelled(other)) or same(spelled(other), spelled(one))
    except (Unreadable, ArithmeticError, RecursionError):
        return False


def is_mathematics(text: str) -> bool:
    """Whether ``text`` is read as something else than words."""
    try:
        return not any(isinstance(each, Words) for each in _leaves(read_spelled(spelled(text))))
    except (Unreadable, RecursionError):
        return False


def _leaves(reading: Reading) -> list[Reading]:
    parts = _parts(reading)
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [reading]


def _closes(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\.", "", text, flags=re.DOTALL):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0
