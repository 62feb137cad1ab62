"""What an agent's function returns, as the message that the parent gets."""

import math
import numbers
from typing import Any

from .failures import cut

MAX_COMPONENTS = 64
MAX_NAME_CHARS = 100


def outcome_of(value: Any) -> "dict[str, Any]":
    """{"reward": number}, or {"components": {name: number}}, or {"failure": reason, "detail": text}."""
    if isinstance(value, dict):
        return _components(value)
    number = _number(value)
    return {"reward": number} if number is not None else _not_finite("the reward", value)


def _components(value: "dict[Any, Any]") -> "dict[str, Any]":
    if not 0 < len(value) <= MAX_COMPONENTS:
        return {"failure": "not_finite", "detail": f"the reward has {len(value)} components: expected 1 to {MAX_COMPONENTS}"}
    components = {}
    for name, part in value.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or cut(name) != name:
            return {"failure": "not_finite", "detail": cut(f"the name of a component of the reward is {name!r:.200}")}
        number = _number(part)
        if number is None:
            return _not_finite(f'component "{name}" of the reward', part)
        components[name] = number
    return {"components": components}


def _number(value: Any) -> "float | None":
    """``value`` as a finite float, also a number of NumPy; None when it is none."""
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError):
        return None
    return number if math.isfinite(number) else None


def _not_finite(what: str, value: Any) -> "dict[str, Any]":
    shown = repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"
    return {"failure": "not_finite", "detail": cut(f"{what} is {shown:.200}: expected a finite number")}
