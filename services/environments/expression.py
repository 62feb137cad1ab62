"""Whole-number expressions, evaluated within bounds: the calculator that a policy may call with any text."""

from __future__ import annotations

import ast
import re

MAX_EXPRESSION_CHARS = 64
MAX_RESULT = 10**15

_ALLOWED = re.compile(r"[0-9+\-*/() ]+")


def evaluate(expression: str) -> int:
    """The value of `expression`: whole numbers, + - * /, brackets; a division must come out even.

    Raises ValueError, with the reason, for anything else. The text is bounded and so is every intermediate value,
    so that no call takes longer than a few microseconds.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only digits, + - * / and brackets are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("not an expression") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        return _bounded(_combine(node.op, _value(node.left), _value(node.right)))
    raise ValueError("not an expression")


def _combine(operator: ast.operator, left: int, right: int) -> int:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            if right == 0:
                raise ValueError("division by zero")
            if left % right:
                raise ValueError("the division does not come out even")
            return left // right
        case _:
            raise ValueError("only + - * / are allowed")


def _bounded(value: int) -> int:
    if abs(value) > MAX_RESULT:
        raise ValueError("the number is too large")
    return value
