"""Results of functions, as they come out of the sandbox.

JSON has no tuples, sets or numbers beyond floats, and Python's ``==`` tells them from lists and floats. So whatever JSON
lacks travels as an object with one key, the kind; a real dictionary is such an object, too (drivers.py writes them).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any


class Unlike:
    """A result that equals nothing: an object that only the program knows."""


def read_result(text: str, *, as_json: bool) -> Any:
    """The result that ``text`` holds.

    With ``as_json`` tuples, sets and other sequences are lists and keys are text, as if JSON had been asked for; otherwise
    each is what it was. Raises: ValueError for what no driver writes, as a program may that writes in its place.
    """
    kinds = _AS_JSON if as_json else _AS_IT_WAS

    def read(found: dict[str, Any]) -> Any:
        ((kind, content),) = found.items()
        return kinds[kind](content)

    try:
        return json.loads(text, object_hook=read)
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"it is no result: {error}") from error


def _unlike(_: Any) -> Unlike:
    return Unlike()


def _integer(digits: str) -> int:
    return int(digits, 16)


def _set_as_list(items: list[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return items


def _text_key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key)


_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "fraction": lambda parts: Fraction(_integer(parts[0]), _integer(parts[1])),
    "decimal": Decimal,
    "complex": lambda parts: complex(*parts),
}
_AS_IT_WAS: dict[str, Callable[[Any], Any]] = {
    **_NUMBERS,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "sequence": _unlike,
    "other": _unlike,
}
_AS_JSON: dict[str, Callable[[Any], Any]] = {
    **_NUMBERS,
    "tuple": list,
    "set": _set_as_list,
    "dict": lambda pairs: {_text_key(key): value for key, value in pairs},
    "sequence": list,
    "other": _unlike,
}
