"""Asks what the command line has left open. Only where somebody sits at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.plain_text import indented_lines, one_line

T = TypeVar("T")
Ask = Callable[[str], str]
"""Shows a text and returns the line that is typed. Raises: EOFError when there is none."""
Tell = Callable[[str], None]


def choose(ask: Ask, tell: Tell, question: str, choices: Mapping[str, str], default: str) -> str:
    """One of ``choices``, by its name or its number; an empty line is ``default``."""
    tell(question)
    names = list(choices)
    width = max(map(len, names))
    for number, (name, text) in enumerate(choices.items(), start=1):
        tell(f"  {number}  {name:<{width}}  {text}")
    while True:
        typed = ask(f"[{default}] ").strip().lower() or default
        if typed in names:
            return typed
        if typed.isdecimal() and 1 <= int(typed) <= len(names):
            return names[int(typed) - 1]
        tell(f"{one_line(typed, 50)!r} is none of them: type a name or a number")


def fill(ask: Ask, question: str, default: str) -> str:
    """A text; an empty line is ``default``."""
    return ask(f"{question} [{default}] ").strip() or default


def taken(ask: Ask, tell: Tell, question: str, default: str, take: Callable[[str], T]) -> T:
    """What ``take`` makes of a text; it is asked again where that raises ConfigurationError, with the reason."""
    while True:
        try:
            return take(fill(ask, question, default))
        except ConfigurationError as error:
            tell(indented_lines(str(error)))


def number(ask: Ask, tell: Tell, question: str, default: int) -> int:
    """A number from 1 up."""
    while True:
        typed = fill(ask, question, str(default))
        if typed.isdecimal() and 0 < int(typed) < 10**6:
            return int(typed)
        tell(f"{one_line(typed, 50)!r} is no number from 1 up")
