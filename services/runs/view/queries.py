"""Values in the addresses that the page asks for. Each raises ValueError with the name, the value and what is possible."""

import math
from collections.abc import Mapping, Sequence


def whole_number(query: Mapping[str, str], name: str) -> int | None:
    """A number from 0 up; None without one."""
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError(f"{name} is {text[:100]!r}: expected a number")
    return int(text)


def finite(query: Mapping[str, str], name: str) -> float | None:
    """Any finite number; None without one."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is {text[:100]!r}: expected a number")
    return value


def one_of(query: Mapping[str, str], name: str, words: Sequence[str]) -> str | None:
    """One of these words; None without one."""
    word = query.get(name)
    if word is not None and word not in words:
        raise ValueError(f"{name} is {word[:100]!r}: one of {', '.join(words)}")
    return word
