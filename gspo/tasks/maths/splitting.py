"""Takes a text apart at signs that stand in no brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from gspo.tasks.maths.expression import Unreadable

MOST_ITEMS: Final = 200
MOST_DIGITS: Final = 60
"""Of a number with commas, as far as it is looked at."""
BRACKETS: Final = {
    "(": ")",
    "[": "]",
    "{": "}",
    "\\{": "\\}",
    "\\langle": "\\rangle",
    "\\lfloor": "\\rfloor",
    "\\lceil": "\\rceil",
}
_CLOSE: Final = frozenset(BRACKETS.values())
_PIECE: Final = re.compile(
    r"\\begin\s*\{[a-zA-Z*]+\}|\\end\s*\{[a-zA-Z*]+\}|\\[A-Za-z]+|\\.|\"[^\"]*\"|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\s+|.",
    re.DOTALL,
)


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """``text`` at the separators that stand in no brackets. A comma within 1,000 is none."""
    parts = [""]
    for piece, sign in pieces_at_top(text):
        if sign in separators:
            parts.append("")
        else:
            parts[-1] += piece
    if len(parts) > MOST_ITEMS:
        raise Unreadable("it says too much")
    return parts


@lru_cache(maxsize=64)
def pieces_at_top(text: str) -> tuple[tuple[str, str], ...]:
    """The pieces of ``text``, each with itself if it stands in no brackets, else with "". Raises: Unreadable."""
    return tuple(_pieces(text))


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    closing: list[str] = []
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece.startswith("\\begin"):
            closing.append("\\end")
        elif piece.startswith("\\end"):
            if closing and closing[-1] == "\\end":
                closing.pop()
        elif closing and closing[-1] == "\\end":
            pass
        elif piece in BRACKETS:
            closing.append(BRACKETS[piece])
        elif piece in _CLOSE:
            # An interval may close with the other kind: (3, 4].
            if not closing or (piece != closing[-1] and {piece, closing[-1]} != {")", "]"}):
                raise Unreadable("its brackets do not match")
            closing.pop()
        elif not closing:
            is_thousand = piece == "," and _is_in_number(text, found.start())
            yield piece, "" if is_thousand else piece
            continue
        yield piece, ""
    if closing:
        raise Unreadable("its brackets do not match")


def _is_in_number(text: str, place: int) -> bool:
    """Whether the comma at ``place`` separates thousands."""
    before = re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", text[max(0, place - MOST_DIGITS) : place])
    return before is not None and re.match(r",\d{3}(?!\d)", text[place : place + 5]) is not None
