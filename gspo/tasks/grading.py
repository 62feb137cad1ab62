"""Answers in mathematics, graded: numbers, expressions, sets, intervals, equations, matrices, words.

    from gspo.tasks.grading import ending_of

    ending_of(r"\\frac{1}{2}", "0.5", "symbolic")  # "right"

docs/guide/programs.md says what counts as equal. What the reader does not know, math-verify compares. Needs the extra
``datasets`` (``pip install 'gspo[datasets]'``).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Literal

from gspo.extras import needs_extras
from gspo.tasks.maths.chosen import chosen
from gspo.tasks.maths.comparison import GoldRules, same
from gspo.tasks.maths.countdown import makes_target
from gspo.tasks.maths.expression import Unreadable
from gspo.tasks.maths.golds import GoldKind, fault_of, gold_kind
from gspo.tasks.maths.left_to_do import is_finished
from gspo.tasks.maths.plain_words import same_text
from gspo.tasks.maths.reading import Words, read_spelled
from gspo.tasks.maths.spelling import spelled

with needs_extras(__name__, "datasets"):
    import mpmath as mpmath  # Without it a rollout is refused before its first answer.

__all__ = ["Ending", "GoldKind", "ending_of", "fault_of", "grade_answer"]

Ending = Literal["right", "wrong", "no_answer", "unreadable", "too_slow"]
"""How a comparison ends. no_answer: None was given. unreadable: it says nothing that could be compared. too_slow: only from
``grade_answer``, which has a limit."""
_COMPONENTS: Final = ("right", "no_answer", "unreadable", "too_slow")
_RULES: Final[Mapping[GoldKind, GoldRules]] = {
    "expression": GoldRules(letters_multiply=True),
    "list": GoldRules(in_order=True),
}

_LEFT_TO_DO: Final = re.compile(r"\\(?:i*int|oint|sum|prod|lim|max|min|gcd|lcm|det|sup|inf|operatorname)(?![A-Za-z])")


class OutOfTime(BaseException):  # not an Exception: parsers catch those and go on
    """An answer has used the processor time that it may."""


def grade_answer(
    gold: str | list[str], answer: str | None, kind: GoldKind, place: str, cpu_s: float, options: Sequence[str] = ()
) -> dict[str, float]:
    """The job of reward workers: 1 in "right" when ``answer`` equals ``gold``, or one of several; else 1 in its ending.

    It uses the process's profiling timer, so it runs in the main thread. Elsewhere use ``ending_of``.

    Args:
        gold: LaTeX, Markdown or plain text, without its box; several are alternatives.
        answer: the same; None when the policy gave none.
        kind: what the gold is.
        place: the row, for errors; may be empty.
        cpu_s: processor seconds for reading ``answer`` and comparing it.
        options: those of a multiple choice, shown as A, B, ...; ``gold`` is the letter of one.

    Raises: ValueError when a gold itself cannot be graded, or outside the main thread.
    """
    golds = [gold] if isinstance(gold, str) else gold
    for each in golds:
        if fault := fault_of(each, kind, options):
            raise ValueError(f"{place}: {fault}" if place else fault)
    ending: Ending
    try:
        # What an answer may cost is counted in processor time, so that a busy machine costs no right one its reward.
        with _processor_time(cpu_s):
            endings = [ending_of(each, answer, kind, options) for each in golds]
        ending = "right" if "right" in endings else endings[0]
    except OutOfTime:
        ending = "too_slow"
    return {name: float(name == ending) for name in _COMPONENTS}


def ending_of(gold: str, answer: str | None, kind: GoldKind, options: Sequence[str] = ()) -> Ending:
    """How the comparison of ``answer`` with ``gold`` ends; never "too_slow", since it has no limit of time.

    Both are LaTeX, Markdown or plain text, without their box; ``answer`` None is "no_answer". ``gold`` must be one that
    ``fault_of`` finds nothing wrong with: of others the ending means nothing. ``options``: as in ``grade_answer``.
    """
    if answer is None:
        return "no_answer"
    if options:
        place = chosen(answer, options)
        return "unreadable" if place is None else "right" if chosen(gold, options) == place else "wrong"
    if kind == "text":
        return "right" if same_text(gold, answer) else "wrong"
    wanted, said = spelled(gold), spelled(answer)
    try:
        if kind == "countdown":
            return "right" if makes_target(gold, answer) else "wrong"
        if kind == "integer" and "%" in said:
            return "wrong"
        if same(wanted, said, _RULES.get(kind, GoldRules())):
            return "wrong" if kind == "number" and not is_finished(said) else "right"
        if kind in ("symbolic", "expression", "list") and gold_kind(gold) == "beyond":
            return "right" if _same_to_math_verify(wanted, said) else "wrong"
        return "unreadable" if isinstance(read_spelled(said), Words) else "wrong"
    except (Unreadable, ArithmeticError, RecursionError, MemoryError):
        # It says nothing, is too large a number, or is nested too deeply.
        return "unreadable"


def _same_to_math_verify(gold: str, said: str) -> bool:
    """What math-verify says of two expressions that its parser has read to their ends.

    Its search for mathematics in a text is not used, because it takes fragments. Nor may an answer leave to do what the gold
    does not.
    """
    if set(_LEFT_TO_DO.findall(said)) - set(_LEFT_TO_DO.findall(gold)):
        return False
    # Loads symbolic algebra, which takes seconds.
    with needs_extras(__name__, "datasets"):
        from latex2sympy2_extended import NormalizationConfig, latex2sympy
        from math_verify import verify

    # The parser's own errors have no common class.
    with suppress(Exception):
        read = [
            latex2sympy(text, is_real=True, normalization_config=NormalizationConfig(units=False)) for text in (gold, said)
        ]
        return bool(verify(read[0], read[1], timeout_seconds=None))
    return False


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
