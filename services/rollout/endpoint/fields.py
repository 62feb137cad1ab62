"""Reads the fields of a client's JSON object with checks: each refusal names the field and what it must be."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.shared.runtime.plain_text import one_line

MAX_DEPTH: Final = 64
"""Nesting of values passed on unchanged: schemas, arguments, template options. Later code is recursive."""
_LARGEST: Final = 2**31 - 1
_SHOWN_CHARACTERS: Final = 60


class Fields:
    """One object. It remembers which fields were read; the others are ``unknown``. A null counts as a missing field."""

    def __init__(self, plain: object, path: str = "") -> None:
        """``path`` is where the object is in the request, empty for the request itself. Raises: CallRefused."""
        if not isinstance(plain, dict):
            raise wrong(path or None, "an object", plain)
        self._plain: dict[str, Any] = plain
        self._path = path
        self._asked: set[str] = set()

    def path(self, name: str) -> str:
        """Return the path of the field ``name`` in the request."""
        return f"{self._path}.{name}" if self._path else name

    @property
    def unknown(self) -> list[str]:
        """Fields with a value that were never read."""
        return [name for name, value in self._plain.items() if value is not None and name not in self._asked]

    def value(self, name: str) -> Any:
        """Return the field's value; None if it is missing."""
        self._asked.add(name)
        return self._plain.get(name)

    def text(self, name: str) -> str | None:
        """Raises: CallRefused for anything but a string."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise wrong(self.path(name), "a string", value)
        return value

    def required_text(self, name: str) -> str:
        """Raises: CallRefused for anything but a string that is not empty."""
        value = self.text(name)
        if not value:
            raise wrong(self.path(name), "a string that is not empty", value)
        return value

    def flag(self, name: str) -> bool | None:
        """Raises: CallRefused for anything but true and false."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.path(name), "true or false", value)
        return value

    def count(self, name: str, *, lowest: int) -> int | None:
        """Return a whole number of at least ``lowest``, capped at 2**31 - 1. Raises: CallRefused."""
        value = self.value(name)
        if value is None:
            return None
        if not is_whole(value) or value < lowest:
            raise wrong(self.path(name), f"a whole number of at least {lowest}", value)
        return min(int(value), _LARGEST)

    def number(self, name: str, *, lowest: float, highest: float) -> float | None:
        """Raises: CallRefused for anything but a number from ``lowest`` to ``highest``."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise wrong(self.path(name), f"a number from {lowest:g} to {highest:g}", value)
        return float(value)

    def items(self, name: str, *, most: int | None = None) -> list[Any] | None:
        """Raises: CallRefused for anything but a list of at most ``most`` items."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong(self.path(name), "a list", value)
        if most is not None and len(value) > most:
            raise wrong(self.path(name), f"a list of at most {most} items", f"one of {len(value)}")
        return value

    def free(self, name: str) -> dict[str, Any] | None:
        """Return an object to pass on unchanged. Raises: CallRefused for any other value, and for deep nesting."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong(self.path(name), "an object", value)
        check_depth(value, self.path(name))
        return value


def wrong(param: str | None, expected: str, value: object) -> CallRefused:
    """Return the refusal of a field that does not hold ``expected``."""
    names = {dict: "an object", list: "a list", type(None): "missing"}
    shown = names.get(type(value)) or one_line(value, _SHOWN_CHARACTERS)
    return CallRefused(400, "invalid_value", f"{param or 'the request'} must be {expected}; it is {shown}", param=param)


def is_whole(value: object) -> bool:
    """Return whether a JSON value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_zero(value: object) -> bool:
    """Return whether a JSON value is the number 0."""
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 0


def check_depth(plain: object, path: str) -> None:
    """Raises: CallRefused when objects and lists are nested deeper than MAX_DEPTH."""
    level: list[Any] = [plain]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise CallRefused(400, "too_deep", f"{path} is nested deeper than {MAX_DEPTH} levels", param=path)


def decode(text: bytes | bytearray | str) -> Any:
    """Decode JSON to plain Python. Raises: ValueError, also for invalid UTF-8 and for excessive nesting."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def decode_body(body: bytes | bytearray) -> Any:
    """Decode a request's body. Raises: CallRefused, status 400, when it is not JSON."""
    try:
        return decode(body)
    except ValueError as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error


def _inside(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer
