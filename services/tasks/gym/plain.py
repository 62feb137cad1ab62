"""What a generator knows of a task, as JSON and back: its verifier must find the types that it has left there.

JSON has no tuples and no sets, and its keys are text. These, and NumPy's numbers, are written as {"$": kind, "of": ...}.
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any, Final

import numpy as np

_KIND: Final = "$"


def as_json(value: Any) -> str:
    """Raises: TypeError for a type that has no form here."""
    return json.dumps(_plain(value), ensure_ascii=False)


def from_json(text: str) -> Any:
    """What ``as_json`` was given."""
    return json.loads(text, object_hook=_restored)


def _plain(value: Any) -> Any:
    match value:
        case np.generic():
            return _plain(value.item())
        case bool() | int() | float() | str() | None:
            # Subclasses too, such as an enumeration of text: json writes their value.
            return value
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return {_KIND: "tuple", "of": [_plain(each) for each in value]}
        case set() | frozenset():
            return {_KIND: "set", "of": sorted((_plain(each) for each in value), key=json.dumps)}
        case dict() if all(type(key) is str for key in value) and _KIND not in value:
            return {key: _plain(each) for key, each in value.items()}
        case dict():
            return {_KIND: "dict", "of": [[_plain(key), _plain(each)] for key, each in value.items()]}
        case np.ndarray():
            return {_KIND: "array", "of": [str(value.dtype), value.tolist()]}
        case Fraction():
            return {_KIND: "fraction", "of": str(value)}
        case _:
            raise TypeError(f"{type(value).__module__}.{type(value).__name__} has no form as JSON")


def _restored(found: dict[str, Any]) -> Any:
    of = found.get("of")
    match found.get(_KIND):
        case "tuple":
            return tuple(of or ())
        case "set":
            return set(of or ())
        case "dict":
            return dict(of or ())
        case "array":
            assert of is not None
            return np.array(of[1], dtype=of[0])
        case "fraction":
            return Fraction(str(of))
        case _:
            return found
