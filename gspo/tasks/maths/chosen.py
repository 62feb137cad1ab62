"""Which option of a multiple choice an answer chooses: by its letter, by its letter and its text, or by its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gspo.tasks.maths.comparison import lettered, same
from gspo.tasks.maths.expression import Unreadable
from gspo.tasks.maths.reading import is_same_spelling
from gspo.tasks.maths.spelling import spelled

_BARE: Final = re.compile(r"([A-Za-z])\s+(.+)", re.DOTALL)


def chosen(answer: str, options: Sequence[str]) -> int | None:
    """The place of the option that ``answer`` chooses; None where it chooses none, or two.

    ``options`` are shown as A, B, ... A letter counts before a text: an option may read "B".
    """
    said = spelled(answer)
    letter, rest = lettered(said)
    if not letter and (bare := _BARE.fullmatch(said)) and _placed(bare[1], options) in _by_text(bare[2], options):
        letter, rest = bare[1], ""
    place = _placed(letter, options) if letter else None
    if place is None:
        texts = _by_text(said, options)
        return texts[0] if len(texts) == 1 else None
    others = [] if not rest else [each for each in _by_text(rest, options) if each != place]
    return None if others and place not in _by_text(rest, options) else place


def _placed(letter: str, options: Sequence[str]) -> int | None:
    place = ord(letter.upper()) - ord("A")
    return place if 0 <= place < len(options) else None


def _by_text(said: str, options: Sequence[str]) -> list[int]:
    """The options whose text is said: in the same spelling, or else by what it means."""
    wanted = [spelled(option) for option in options]
    alike = [place for place, text in enumerate(wanted) if text and is_same_spelling(text.lower(), said.lower())]
    return alike or [place for place, text in enumerate(wanted) if _is_same(text, said)]


def _is_same(text: str, said: str) -> bool:
    try:
        return same(text, said)
    except (Unreadable, ArithmeticError, RecursionError):
        return False
