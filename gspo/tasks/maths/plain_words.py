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
    # Not the A of A-C-B, nor of vitamin A: an article stands before a word.
    followed = zip(tokens, [*tokens[1:], ""], strict=True)
    return [_valued(token) for token, after in followed if token not in _ARTICLES or len(after) < 2]


def _valued(token: str) -> str | Fraction:
    number = re.sub(r",(?=\d{3}(?!\d))", "", token)
    return Fraction(number) if re.fullmatch(r"[-+]?\d+(?:\.\d+)?", number) else token
