"""Evaluates whole-number expressions within bounds: the calculator that a policy may call with any text."""

from __future__ import annotations

import re

MAX_EXPRESSION_CHARS = 64
MAX_RESULT = 10**15

_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_TOKEN = re.compile(r"[0-9]+|[+\-*/()]")


def evaluate(expression: str) -> int:
    """The value of ``expression``: whole numbers, + - * /, brackets; a division must come out even.

    Raises: ValueError, with the reason, for anything else. The text and every intermediate value are bounded, so no call
    takes longer than some microseconds.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only digits, + - * / and brackets are allowed")
    # Not Python's own parser: on 3.11 it keeps its recursion depth in one place for all threads.
    return _Parser(_TOKEN.findall(expression)).whole()


class _Parser:
    """Recursive descent: sum = product {+|- product}; product = signed {*|/ signed}; signed = {-} (number | bracket)."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    def whole(self) -> int:
        value = self._sum()
        if self._position < len(self._tokens):
            raise ValueError(f'"{self._tokens[self._position]}" where an operator or the end should be')
        return value

    def _take(self, *wanted: str) -> str | None:
        """Take the next token if it is one of ``wanted``; else None."""
        if self._position == len(self._tokens) or self._tokens[self._position] not in wanted:
            return None
        self._position += 1
        return self._tokens[self._position - 1]

    def _sum(self) -> int:
        value = self._product()
        while operator := self._take("+", "-"):
            right = self._product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self) -> int:
        value = self._signed()
        while operator := self._take("*", "/"):
            right = self._signed()
            value = _bounded(value * right if operator == "*" else _even_quotient(value, right))
        return value

    def _signed(self) -> int:
        if self._take("-"):
            return -self._signed()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ValueError("a bracket is not closed")
            return value
        if self._position == len(self._tokens):
            raise ValueError("a number is missing at the end")
        token = self._tokens[self._position]
        if not token.isdigit():
            raise ValueError(f'"{token}" where a number should be')
        self._position += 1
        return _bounded(int(token))


def _even_quotient(left: int, right: int) -> int:
    if right == 0:
        raise ValueError("division by zero")
    if left % right:
        raise ValueError("the division does not come out even")
    return left // right


def _bounded(value: int) -> int:
    if abs(value) > MAX_RESULT:
        raise ValueError("the number is too large")
    return value
