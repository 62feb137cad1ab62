"""Rewards as user code returns them, good and bad. Workers import ``grade`` and ``solve``, which return one by its name."""

from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np

from gspo.tasks.agents import Episode


class Hostile:
    """A value whose own code raises, or returns what it likes."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __float__(self) -> float:
        if isinstance(self._answer, BaseException):
            raise self._answer.with_traceback(None)
        return self._answer  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        raise SystemExit(4)


class NumberInAList(list[float]):
    """A container that can be converted."""

    def __float__(self) -> float:
        return self[0]


class Leaves(dict[str, float]):
    """Components that nobody can read."""

    def items(self) -> Any:
        raise SystemExit(5)


class NumberInAText(str):
    def __float__(self) -> float:
        return 1.0


class RealComplex(complex):
    def __float__(self) -> float:
        return self.real


GOOD: dict[str, tuple[Any, float]] = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "float": (-0.5, -0.5),
    "Decimal": (Decimal("0.25"), 0.25),
    "Fraction": (Fraction(1, 8), 0.125),
    "int64": (np.int64(7), 7.0),
    "uint8": (np.uint8(1), 1.0),
    "float16": (np.float16(0.5), 0.5),
    "float32": (np.float32(0.5), 0.5),
    "longdouble": (np.longdouble(2), 2.0),
    "bool_": (np.bool_(True), 1.0),
    "sum of an array": (np.sum(np.array([1, 2])), 3.0),
    "array of shape ()": (np.array(1.5), 1.5),
    "own class": (Hostile(4.0), 4.0),
}
"""By name: the value, and the reward that it is."""

WRONG: dict[str, tuple[Any, str, str]] = {
    "None": (None, "not_finite", "the reward is None (NoneType): expected a finite number"),
    "text": ("one", "not_finite", "the reward is 'one' (str): expected"),
    "long text": ("x" * 10_000, "not_finite", "xxx' (str): expected"),
    "text of a number": ("1", "not_finite", "'1' (str)"),
    "bytes": (b"1", "not_finite", "b'1' (bytes)"),
    "complex": (1j, "not_finite", "1j (complex)"),
    "complex64": (np.complex64(1), "not_finite", "(complex64)"),
    "numpy text": (np.str_("1"), "not_finite", "(str_)"),
    "list": ([1.0], "not_finite", "[1.0] (list)"),
    "list with __float__": (NumberInAList([1.0]), "not_finite", "[1.0] (NumberInAList)"),
    "text with __float__": (NumberInAText("1"), "not_finite", "'1' (NumberInAText)"),
    "complex with __float__": (RealComplex(1), "not_finite", "(RealComplex)"),
    "tuple": ((0.5, 1), "not_finite", "(0.5, 1) (tuple)"),
    "class": (float, "not_finite", "<class 'float'> (type)"),
    "nan": (float("nan"), "not_finite", "the reward is nan (float): expected a finite number, or a dict of named ones"),
    "infinity": (float("-inf"), "not_finite", "-inf (float)"),
    "nan of numpy": (np.float32("nan"), "not_finite", "(float32)"),
    "signaling nan": (Decimal("sNaN"), "not_finite", "ValueError"),
    "huge int": (10**400, "not_finite", "(int): expected a finite number, or a dict of named ones; a float holds up to"),
    "int of many digits": (10**5000, "not_finite", "an object of type int"),
    "array of shape (1,)": (np.array([1.0]), "not_finite", "it has shape (1,), so return one number of it"),
    "array of shape (1, 1)": (np.array([[1.0]]), "not_finite", "shape (1, 1)"),
    "long array": (np.arange(5000.0), "not_finite", "shape (5000,)"),
    "empty array": (np.array([]), "not_finite", "shape (0,)"),
    "array of text": (np.array("1"), "not_finite", "(ndarray)"),
    "array of complex": (np.array(1 + 0j), "not_finite", "(ndarray)"),
    "array of None": (np.array(None), "not_finite", "(ndarray)"),
    "raises": (Hostile(ZeroDivisionError("mine")), "not_finite", "named ones; reading it raised ZeroDivisionError: mine"),
    "exits": (Hostile(SystemExit(3)), "not_finite", "SystemExit: 3"),
    "interrupts": (Hostile(KeyboardInterrupt()), "not_finite", "KeyboardInterrupt"),
    "leaves a generator": (Hostile(GeneratorExit()), "not_finite", "GeneratorExit"),
    "returns text": (Hostile("1"), "not_finite", "non-float"),
    "returns nan": (Hostile(float("nan")), "not_finite", "type Hostile"),
}  # fmt: skip
"""By name: the value, and the reason and the words of the failure."""

COMPONENTS: dict[str, Any] = {
    "plain": {"a": 1, "b-2.c_": 0.25},
    "of numpy": {"a": np.int8(1), np.str_("b-2.c_"): np.float32(0.25)},
    "ordered": OrderedDict({"a": True, "b-2.c_": Decimal("0.25")}),
    "read-only": MappingProxyType({"a": np.array(1), "b-2.c_": Fraction(1, 4)}),
}
"""All are these: {"a": 1.0, "b-2.c_": 0.25}."""

WRONG_COMPONENTS: dict[str, tuple[Any, str, str]] = {
    "leaves": (Leaves(), "not_finite", "an object of type Leaves, and reading it raised SystemExit: 5"),
    "none": ({}, "missing_component", "the reward has no components"),
    "None": ({"a": None}, "not_finite", 'component "a" of the reward is None (NoneType): expected a finite number'),
    "text": ({"a": 1.0, "b": "1"}, "not_finite", "component \"b\" of the reward is '1' (str)"),
    "nan": ({"a": float("nan")}, "not_finite", 'component "a" of the reward is nan (float)'),
    "nested": ({"a": {"b": 1.0}}, "not_finite", "{'b': 1.0} (dict)"),
    "array": ({"a": np.ones(3)}, "not_finite", "shape (3,)"),
    "number as name": ({1: 1.0}, "bad_component", "is called 1 (int): a name is text of 1 to 64 letters"),
    "space": ({"a b": 1.0}, "bad_component", "'a b' (str)"),
    "line break": ({"a\n": 1.0}, "bad_component", "'a\\n' (str)"),
    "empty name": ({"": 1.0}, "bad_component", "'' (str)"),
    "dot first": ({".a": 1.0}, "bad_component", "'.a' (str)"),
    "long name": ({"a" * 65: 1.0}, "bad_component", "aaa' (str)"),
    "surrogate": ({"\ud800": 1.0}, "bad_component", "'\\ud800' (str)"),
    "17": ({f"c{n}": 1.0 for n in range(17)}, "bad_component", "17 components, 16 allowed (MAX_COMPONENTS)"),
}
"""By name: the value, and the reason and the words of the failure."""

SIXTEEN = {f"c{n}": 1.0 for n in range(16)}
SEVENTEEN = {f"c{n}": 1.0 for n in range(17)}

_TABLES: dict[str, Any] = {
    "good": GOOD, "wrong": WRONG, "components": COMPONENTS, "wrong components": WRONG_COMPONENTS,
    "count": {"16": SIXTEEN, "17": SEVENTEEN},
}  # fmt: skip


def value_at(table: str, name: str) -> Any:
    """The value of a table."""
    found = _TABLES[table][name]
    return found[0] if isinstance(found, tuple) else found


def grade(table: str, name: str) -> Any:
    return value_at(table, name)


async def solve(episode: Episode) -> Any:
    return value_at(str(episode.task["table"]), str(episode.task["name"]))
