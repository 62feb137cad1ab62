"""Questions whose arithmetic, said again, is their own answer: a policy finds that out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from gspo.tasks.maths.golds import GoldKind

CPU_S: Final = 1.0
"""Processor seconds for one question: a prompt may hold any arithmetic."""
_ARITHMETIC: Final = re.compile(r"(?<!\\)[\d(](?:[\d\s.,()+\-*/^×÷]|\\(?:times|cdot|div)(?![A-Za-z]))*[\d)]")
_OPERATION: Final = re.compile(r"[\d)]\s*(?:[+\-*/^×÷]|\\(?:times|cdot|div))")


def said_again(questions: Iterable[tuple[str, list[str]]], kind: GoldKind) -> list[str]:
    """The arithmetic of each question, with the answers that are right for it, which is itself graded right."""
    # Loads what rewards need.
    from gspo.tasks.grading import grade_answer

    said = ((arithmetic_in(question), golds) for question, golds in questions)
    return [text for text, golds in said if text and grade_answer(golds, text, kind, "", CPU_S)["right"]]


def arithmetic_in(text: str) -> str:
    """The longest piece of arithmetic in ``text``; "" without one."""
    pieces = [piece for piece in _ARITHMETIC.findall(text) if _OPERATION.search(piece)]
    return max(pieces, key=len, default="").strip()
