"""Compares two mathematical answers. Only reward workers import this: symbolic algebra takes seconds to load, may run for
ever, and limits itself by signals that only a process's main thread receives."""

from __future__ import annotations

from math_verify import parse, verify


def verify_answer(gold: str | list[str], answer: str) -> float:
    """1 when the last answer found in ``answer`` equals ``gold``, or one of several, else 0.

    Raises: ValueError when ``gold`` itself cannot be read: that is a mistake in the data, not a wrong answer.
    """
    if isinstance(gold, list):
        return max(verify_answer(each, answer) for each in gold)
    gold_parsed = parse(gold)
    if not gold_parsed:
        raise ValueError(f"the data set's answer {gold!r} is not a mathematical expression")
    return 1.0 if verify(gold_parsed, parse(answer)) else 0.0
