"""Texts compared as texts: words without case, marks and articles, and numbers by their value."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Final

_TOKEN: Final = re.compile(r"(?<!\w)[-+]?\d+(?:[.,:/-]\d+)*%?|[^\W_]+(?:\+\+|#)?")
_ARTICLES: Final = ("a", "an", "the")
_COMMAND: Final = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|emph)\s*\{([^{}]*)\}|[$*`{}]|\\(?=[%$ ])")


def same_text(gold: str, said: str) -> bool:
    """Whether ``said`` has the words of ``gold`` in their order. SQuAD's own scorer leaves the same out; numbers keep their
    signs, points and percents here."""
    wanted = _tokens(gold)
    return bool(wanted) and wanted == _tokens(said)


def _tokens(text: str) -> list[str | Fraction]:
    for _ in range(4):
        text, found = _COMMAND.subn(r" \1 ", text)
        if not found:
            break
    text = (
        unicodedata.normalize("NFKC", text)
        .replace("\u2212", "-")
        .replace("\u2013", "-")
        .replace("'", "")
        .replace("\u2019", "")
    )
    tokens = _TOKEN.findall(text.casefold())
    without = [token for token in tokens if token not in _ARTICLES]
    # "A" may be the answer.
    return [_valued(token) for token in without or tokens]


def _valued(token: str) -> str | Fraction:
    number = re.sub(r",(?=\d{3}(?!\d))", "", token)
    return Fraction(number) if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", number) else token
