"""Reads one expression of LaTeX or plain text as a tree. What it does not know for certain, it refuses.

Two numbers side by side are no product, ``2(3)`` is one, ``2\\frac{1}{2}`` is a mixed number, and nothing is skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias


class Unreadable(ValueError):
    """A text that is not one expression."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, or one of the constants \\pi, e, i and \\infty."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """``kind`` of ``parts``: +, *, /, ^, -, or the name of a function."""

    kind: str
    parts: tuple[Node, ...]


Node: TypeAlias = "Number | Name | Operation"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|\d+\.\d+|\.\d+|\d+)"
    r"|(?P<command>\\[A-Za-z]+|\\[|{}])|(?P<letter>[A-Za-z])|(?P<mark>\.\.\.|[-+*/^_!()\[\]{}|']))"
)
_GREEK: Final = _words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega pi infty ell hbar"
)
_FUNCTIONS: Final = _words("sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log lg exp")
_ACCENTS: Final = _words("overline bar vec hat tilde widehat dot overrightarrow mathcal mathbb mathfrak mathscr")
_PLAIN_FUNCTIONS: Final = re.compile(
    r"(?<![A-Za-z\\])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp)(?=[\s(^_{\d])"
)
_LONG_NAME: Final = re.compile(r"(?:_|\\(?:overline|bar|vec|hat|overrightarrow))\s*\{\s*[A-Za-z]+\s*\}")
_WORD: Final = re.compile(r"(?<![A-Za-z\\])(?!(?:arcsin|arccos|arctan|sqrt)(?![A-Za-z]))[A-Za-z]{4,}")
"""Four letters in a row are no product."""
MOST_TOKENS: Final = 1_000


def read_expression(text: str) -> Node:
    """The tree of all of ``text``, which is ``spelled``. Raises: Unreadable."""
    if _WORD.search(_LONG_NAME.sub("", text)):
        raise Unreadable("it has words")
    return _Reader(_tokens(_PLAIN_FUNCTIONS.sub(r"\\\1", text))).whole()


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None or token["mark"] == "...":
            raise Unreadable(f"{text[place : place + 20]!r} is not mathematics")
        found.append(token[0].strip())
        place = token.end()
        if len(found) > MOST_TOKENS:
            raise Unreadable("it is too long")
    return found


class _Reader:
    """Recursive descent: sum, product, quotient, sign, implicit product, power, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._bars = 0

    def whole(self) -> Node:
        found = self._sum()
        if self._place < len(self._tokens):
            raise Unreadable(f"{self._tokens[self._place]!r} is in the way")
        return found

    @property
    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next
        self._place += 1
        return token

    def _require(self, token: str) -> None:
        if self._take() != token:
            raise Unreadable(f"{token!r} is missing")

    def _sum(self) -> Node:
        parts = [self._product()]
        while self._next in ("+", "-"):
            sign = self._take()
            part = self._product()
            parts.append(part if sign == "+" else Operation("-", (part,)))
        return parts[0] if len(parts) == 1 else Operation("+", tuple(parts))

    def _product(self) -> Node:
        found = self._signed()
        while self._next in ("*", "/", "\\cdot", "\\times"):
            sign = self._take()
            right = self._signed()
            found = Operation("/" if sign == "/" else "*", (found, right))
        return found

    def _signed(self) -> Node:
        if self._next in ("+", "-"):
            sign = self._take()
            part = self._signed()
            return Operation("-", (part,)) if sign == "-" else part
        return self._juxtaposed()

    def _juxtaposed(self) -> Node:
        """Factors side by side."""
        begin = self._place
        parts = [self._power()]
        while self._begins_atom():
            before, place = self._tokens[self._place - 1], self._place
            if (self._next[0].isdigit() or self._next[0] == ".") and before not in ("!", ")"):
                raise Unreadable(f"{before} and {self._next} stand side by side")
            part = self._power()
            if self._tokens[place] == "\\frac" and place == begin + 1 and _is_mixed(parts[0], part):
                parts[0] = Operation("+", (parts[0], part))
            else:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Operation("*", tuple(parts))

    def _begins_atom(self) -> bool:
        token = self._next
        if token == "|":
            return self._bars == 0
        if not token or token in ("+", "-", "*", "/", "^", "_", "!", ")", "]", "}", "\\}", "'", "\\|", "\\{"):
            return False
        return token not in ("\\cdot", "\\times", "\\rfloor", "\\rceil")

    def _power(self) -> Node:
        base = self._postfixed()
        if self._next != "^":
            return base
        self._take()
        if self._next == "\\circ":
            self._take()
            return self._raised(Operation("degrees", (base,)))
        return self._raised(Operation("^", (base, self._exponent())))

    def _raised(self, node: Node) -> Node:
        if self._next == "^":
            raise Unreadable("a power of a power needs brackets")
        while self._next == "!":
            node = self._factorial(node)
        return node

    def _exponent(self) -> Node:
        if self._next in ("+", "-"):
            sign = self._take()
            part = self._exponent()
            return Operation("-", (part,)) if sign == "-" else part
        if self._next == "{":
            return self._group("{", "}")
        if self._next == "(":
            return self._group("(", ")")
        return self._atom()

    def _postfixed(self) -> Node:
        node = self._atom()
        while self._next == "!":
            node = self._factorial(node)
        return node

    def _factorial(self, node: Node) -> Node:
        self._take()
        if self._next == "!":
            self._take()
            return Operation("double factorial", (node,))
        return Operation("factorial", (node,))

    def _group(self, left: str, right: str) -> Node:
        self._require(left)
        bars, self._bars = self._bars, 0
        found = self._sum()
        self._bars = bars
        self._require(right)
        return found

    def _atom(self) -> Node:
        token = self._next
        if token and (token[0].isdigit() or token[0] == "."):
            self._take()
            if self._next == "_":
                raise Unreadable("a number in another base")
            return Number(Fraction(token.replace(",", "")))
        if token in ("(", "[", "{"):
            return self._group(token, {"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            self._take()
            self._bars += 1
            found = self._sum()
            self._bars -= 1
            self._require("|")
            return Operation("abs", (found,))
        if token.isalpha() and len(token) == 1:
            self._take()
            return Name(token + self._subscript())
        if token.startswith("\\"):
            return self._of_command(token[1:])
        raise Unreadable(f"{token!r} is in the way" if token else "it ends too early")

    def _of_command(self, name: str) -> Node:
        self._take()
        if name in _GREEK:
            return Name("\\" + name + self._subscript())
        if name in _FUNCTIONS:
            return self._function(name)
        if name == "frac":
            return Operation("/", (self._argument(), self._argument()))
        if name == "binom":
            return Operation("binomial", (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name in ("lfloor", "lceil"):
            found = self._sum()
            self._require("\\r" + name[1:])
            return Operation(name[1:], (found,))
        if name in _ACCENTS and self._next == "{":
            return Name(f"\\{name}" + self._raw_group() + self._subscript())
        raise Unreadable(f"\\{name} is not known")

    def _root(self) -> Node:
        degree: Node = Number(Fraction(2))
        if self._next == "[":
            degree = self._group("[", "]")
        inside = self._atom() if self._next not in ("{",) else self._group("{", "}")
        return Operation("root", (inside, degree))

    def _argument(self) -> Node:
        """As LaTeX has it: a group in braces, or one sign; of a number only its first digit."""
        if self._next == "{":
            return self._group("{", "}")
        token = self._next
        if token.isdigit() and len(token) > 1:
            self._tokens[self._place : self._place + 1] = [token[0], token[1:]]
        return self._atom()

    def _function(self, name: str) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        while self._next in ("^", "_"):
            if self._take() == "^":
                exponent = self._exponent()
            else:
                base = self._argument() if not self._next.isdigit() else self._atom()
        inside = self._power_free() if self._next in ("(", "{", "[") else self._bare_argument()
        parts = (inside,) if base is None else (inside, base)
        if exponent == Operation("-", (Number(Fraction(1)),)) and name in ("sin", "cos", "tan", "cot"):
            return Operation("arc" + name, parts)
        found = Operation(name, parts)
        return found if exponent is None else Operation("^", (found, exponent))

    def _power_free(self) -> Node:
        left = self._next
        return self._group(left, {"(": ")", "[": "]", "{": "}"}[left])

    def _bare_argument(self) -> Node:
        """The argument of a function without brackets: factors up to the next sign, bracket or function."""
        sign = self._next == "-" and bool(self._take())
        parts: list[Node] = []
        while self._begins_atom() and self._next not in ("(", "[", "|") and self._next.lstrip("\\") not in _FUNCTIONS:
            if parts and self._next[0].isdigit():
                break
            parts.append(self._power())
        if not parts:
            raise Unreadable("a function has no argument")
        found = parts[0] if len(parts) == 1 else Operation("*", tuple(parts))
        if self._next == "/" and Name("\\pi") in parts:
            # cos 2\pi/7: nobody divides the cosine of 2\pi.
            self._take()
            found = Operation("/", (found, self._power()))
        return Operation("-", (found,)) if sign else found

    def _subscript(self) -> str:
        """The rest of a variable's name: its index and its primes."""
        rest = ""
        while self._next in ("_", "'"):
            if self._take() == "'":
                rest += "'"
            else:
                rest += "_" + (self._raw_group() if self._next == "{" else "{" + self._take() + "}")
        return rest

    def _raw_group(self) -> str:
        self._require("{")
        begin, depth = self._place, 1
        while depth:
            token = self._take()
            if not token:
                raise Unreadable("a brace is not closed")
            depth += (token == "{") - (token == "}")
        return "{" + " ".join(self._tokens[begin : self._place - 1]) + "}"


def _is_mixed(whole: Node, part: Node) -> bool:
    """Whether a whole number and a fraction beside it are a mixed number."""
    return (
        isinstance(whole, Number)
        and whole.value.denominator == 1
        and isinstance(part, Operation)
        and part.kind == "/"
        and all(isinstance(each, Number) and each.value.denominator == 1 for each in part.parts)
    )
