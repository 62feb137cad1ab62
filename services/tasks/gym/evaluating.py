"""What verifiers may evaluate of an answer.

Nine of them (0.1.25) give the answer to Python's ``eval`` or to SymPy's ``parse_expr``, which calls it. There an answer can
name the right one (``entry["answer"]``), have SymPy work it out (``integrate``), or run any code and say its own score. Two
others take NaN for any number. While a verifier scores, it has functions of these names that refuse all of that. A refusal
is an error, as for any text without sense, and the verifier scores it so.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

import sympy

_ARITHMETIC: Final = re.compile(r"[\d\s()+*/%^!.-]+", re.ASCII)
"""No letters: no names, and no numbers such as 1e2 and 0x64, which countdown does not see among the numbers used."""
_OPERATORS: Final = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd, ast.Load,
)  # fmt: skip
FUNCTIONS: Final = frozenset({
    "sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "abs", "sign", "pow", "factorial", "Rational", "Integer", "Float",
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc",
    "sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth", "asech", "acsch",
    "gamma", "erf", "erfc", "erfi", "Ei", "Si", "Ci", "Shi", "Chi", "li", "fresnels", "fresnelc",
})  # fmt: skip
"""What an answer in algebra may call. None of them works an answer out."""
EVALUATORS: Final = frozenset({"eval", "exec", "compile", "parse_expr", "sympify", "S", "lambdify"})

_parse_expr: Final = sympy.parse_expr


def arithmetic(text: str, **how: Any) -> Any:
    """A value of numbers, operators and parentheses. Raises: ValueError for other text, and as ``parse_expr``."""
    if _ARITHMETIC.fullmatch(text) is None:
        raise ValueError("it is no arithmetic: expected numbers, + - * / % ^ ! and parentheses")
    return _parse_expr(text, **how)


def algebra(text: str, **how: Any) -> Any:
    """A value of numbers, names, operators and ``FUNCTIONS``. Raises: ValueError for other text, and as ``parse_expr``."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
                pass
            case ast.Constant(value=int() | float()) | ast.Name():
                pass
            case _ if not isinstance(node, _OPERATORS):
                raise ValueError(f"it has a {type(node).__name__}, which is no algebra here")
    return _parse_expr(text, **how)


def size(value: Any) -> Any:
    """As ``abs``. Raises: ValueError where that is no finite number."""
    found = abs(value)
    if not math.isfinite(found):
        raise ValueError(f"it is {found}")
    return found


def is_guarded(name: str) -> bool:
    """Whether the verifier of generator ``name`` has a function of this module in ``guarding``."""
    return name in _PLACES


def evaluates(verifier: FunctionType) -> bool:
    """Whether a verifier itself names a function that evaluates text."""
    return not EVALUATORS.isdisjoint(verifier.__code__.co_names)


@contextmanager
def guarding(name: str, module: str) -> Iterator[None]:
    """The verifier of generator ``name``, which is defined in ``module``, finds a function of this module under its name."""
    if name not in _PLACES:
        yield
        return
    where, attribute, function = _PLACES[name]
    names = vars(sys.modules[where or module])
    absent = object()
    former = names.get(attribute, absent)
    names[attribute] = function
    try:
        yield
    finally:
        if former is absent:
            del names[attribute]
        else:
            names[attribute] = former


# The module, "" for the verifier's own; the name in it; what the name then is.
_LITERAL: Final = ("", "eval", ast.literal_eval)
_SIZE: Final = ("", "abs", size)
_PLACES: Final[Mapping[str, tuple[str, str, Callable[..., Any]]]] = {
    "binary_matrix": _LITERAL,
    "n_queens": _LITERAL,
    "spiral_matrix": _LITERAL,
    "string_insertion": _LITERAL,
    "complex_arithmetic": _SIZE,
    "number_sorting": _SIZE,
    "countdown": ("", "parse_expr", arithmetic),
    "puzzle24": ("", "parse_expr", arithmetic),
    "intermediate_integration": ("sympy", "parse_expr", algebra),
    "polynomial_multiplication": ("sympy", "parse_expr", algebra),
    "simple_integration": ("sympy", "parse_expr", algebra),
}
