"""Scores an answer in mathematics: as an integer, or as an expression by math-verify, within a time of the processor.

Symbolic algebra may run for ever. What an answer may cost is counted in processor time, so that a busy machine costs no
right answer its reward; math-verify's own limits count the clock, and are off.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

MOST_DIGITS: Final = 1_000
_INTEGER: Final = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")
_DECORATION: Final = re.compile(r"\\[,;:! ]|\\left|\\right|[$\s]|\\text\s*\{\s*\}")


class OutOfTime(BaseException):  # not an Exception: parsers catch those and go on
    """An answer has used the processor time that it may."""


def integer_answer(gold: str | list[str], answer: str | None) -> dict[str, float]:
    """1 in "right" when ``answer`` is the integer ``gold``, or one of several, however it is written: 042, 1,000 or 7.0.

    ``answer`` None: the policy gave none. Raises: ValueError when ``gold`` is no integer.
    """
    if isinstance(gold, list):
        return max((integer_answer(each, answer) for each in gold), key=_is_right)
    wanted = integer_in(gold)
    if wanted is None:
        raise ValueError(f"the data set's answer {gold!r} is not an integer")
    if answer is None:
        return _components(no_answer=True)
    said = integer_in(answer)
    return _components(right=said == wanted, unreadable=said is None)


def math_answer(gold: str | list[str], answer: str | None, place: str, cpu_s: float) -> dict[str, float]:
    """1 in "right" when ``answer`` equals ``gold``, or one of several; all are LaTeX or plain expressions without their box.

    ``answer`` None: the policy gave none. ``place`` is the row, for errors. ``cpu_s``: processor seconds for reading
    ``answer`` and comparing it. Raises: ValueError when ``gold`` itself cannot be read.
    """
    if isinstance(gold, list):
        return max((math_answer(each, answer, place, cpu_s) for each in gold), key=_is_right)
    # Loads symbolic algebra, which takes seconds.
    from math_verify import parse, verify

    wanted = parse(_boxed(gold), parsing_timeout=None)
    if not wanted:
        raise ValueError(
            f"{place}: the data set's answer {gold!r} is not a mathematical expression: correct or leave out the row"
        )
    if answer is None:
        return _components(no_answer=True)
    try:
        with _processor_time(cpu_s):
            said: list[Any] = parse(_boxed(answer), parsing_timeout=None)
            right = bool(said) and bool(verify(wanted, said, timeout_seconds=None))
    except OutOfTime:
        return _components(too_slow=True)
    except (RecursionError, MemoryError):
        # It is nested too deeply, or too large a number.
        return _components(unreadable=True)
    return _components(right=right, unreadable=not said)


def _is_right(components: dict[str, float]) -> float:
    return components["right"]


def integer_in(text: str) -> int | None:
    """The integer that ``text`` is; None when it is anything else."""
    bare = _DECORATION.sub("", text).replace("{,}", "").strip(".")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", bare):
        bare = bare.replace(",", "")
    found = _INTEGER.fullmatch(bare)
    if found is None or len(found[2]) > MOST_DIGITS:
        return None
    return int(found[1] + found[2])


def _boxed(text: str) -> str:
    """So that all of it is read, and not a part of it that looks like mathematics."""
    return f"\\boxed{{{text}}}"


def _components(
    *, right: bool = False, no_answer: bool = False, unreadable: bool = False, too_slow: bool = False
) -> dict[str, float]:
    return {
        "right": float(right), "no_answer": float(no_answer), "unreadable": float(unreadable), "too_slow": float(too_slow),
    }  # fmt: skip


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raises: OutOfTime inside the block after ``seconds`` of this process's processor time."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, ended)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
