"""What a reward is: a finite number, or named components that are finite numbers.

This module reads the reward of every function, agent, service, program and environment. It returns plain floats, and the
code behind it trusts them.

A number is a finite value with ``__float__``: bool, int, float, Decimal, Fraction, NumPy scalars, and arrays and tensors of
shape (). Text and complex numbers are refused even where NumPy could convert them. So is an array or a tensor of shape (1,):
PyTorch converts it and NumPy does not, and a reward function that returns one has usually forgotten an index.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

from .failures import cut, described, kind_of

UnscoredReason = Literal["not_finite", "missing_component", "bad_component"]
"""not_finite: not a finite number. bad_component: too many components, or a name that no metric can have.
missing_component: no components at all, or not those that have a weight."""

MAX_COMPONENTS = 16
"""The limit of the wire. A copy of ``protocol/limits.py``, because an agent's own Python cannot import that package."""
MAX_TURNS = 4096
"""Another copy."""
TURNS = "turns"
"""Where an agent returns a list, with the reward of each of its turns."""
COMPONENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""A copy of ``protocol/messages/base.py::ComponentName``, for the same reason."""

NUMBER = "expected a finite number"
NUMBER_OR_COMPONENTS = "expected a finite number, or a dict of named ones"
MAX_SHOWN_CHARS = 100
MAX_DIMENSIONS = 64
"""More no array has."""

_NEVER_NUMBERS = (str, bytes, bytearray, complex, list, tuple, set, frozenset)
"""Some subclasses of these have ``__float__``: ``numpy.str_``, for one."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_CHARS


class UnscoredError(ValueError):
    """There is no reward in what was returned."""

    def __init__(self, reason: UnscoredReason, text: str) -> None:
        super().__init__(cut(text))
        self.reason: UnscoredReason = reason


def value_of(value: Any) -> "float | dict[str, float]":
    """The reward that user code returned: a float, or its components by name.

    Raises: UnscoredError with the value, its type and what was expected, whatever the value's own code raises; MemoryError,
    which is not about the value.
    """
    try:
        return _read(value)
    except (UnscoredError, MemoryError):
        raise
    # A mapping's own code runs here, and even the question what type a value has may be answered by it.
    except BaseException as error:
        text = f"the reward is an object of type {kind_of(value)}, and reading it raised {described(error)}"
        raise UnscoredError("not_finite", text) from error


def _read(value: Any) -> "float | dict[str, float]":
    if not isinstance(value, Mapping):
        return number_of(value, "the reward", NUMBER_OR_COMPONENTS)
    components: dict[str, float] = {}
    # Not its length, which may be a lie: no more is read than there may be.
    for num_before, (given, part) in enumerate(value.items()):
        if num_before >= MAX_COMPONENTS:
            require_count(max(len(value), num_before + 1))
        name = _name_of(given)
        components[name] = number_of(part, f'component "{name}" of the reward')
    if not components:
        raise UnscoredError("missing_component", "the reward has no components: return a dict with at least one number")
    return components


def split_turns(value: Any) -> "tuple[list[float] | None, Any]":
    """What an agent returned as the rewards of its turns, a list under TURNS, and the rest, which is 0.0 where nothing is
    left; None and ``value`` itself without such a list.

    Raises: UnscoredError, whatever the value's own code raises; MemoryError.
    """
    try:
        turns = value.get(TURNS) if isinstance(value, Mapping) else None
        if not isinstance(turns, (list, tuple)):
            return None, value
        if len(turns) > MAX_TURNS:
            raise UnscoredError("not_finite", f"the reward is of {len(turns)} turns, {MAX_TURNS} allowed (MAX_TURNS)")
        rewards = [number_of(each, f"the reward of turn {place}") for place, each in enumerate(turns)]
        rest = {name: part for name, part in value.items() if name != TURNS}
    except (UnscoredError, MemoryError):
        raise
    # As in ``value_of``.
    except BaseException as error:
        text = f"the reward is an object of type {kind_of(value)}, and reading it raised {described(error)}"
        raise UnscoredError("not_finite", text) from error
    return rewards, rest or 0.0


def agent_outcome_of(value: Any) -> "dict[str, Any]":
    """``outcome_of`` for an agent, whose reward may be of its turns: then with {"turns": [float]} beside it."""
    try:
        turns, rest = split_turns(value)
    except UnscoredError as error:
        return {"failure": error.reason, "detail": str(error)}
    return outcome_of(rest) if turns is None else {**outcome_of(rest), "turns": turns}


def outcome_of(value: Any) -> "dict[str, Any]":
    """What a worker tells its parent of a reward: {"reward": float}, {"components": {name: float}}, or {"failure": reason,
    "detail": text}."""
    try:
        reward = value_of(value)
    except UnscoredError as error:
        return {"failure": error.reason, "detail": str(error)}
    return {"components": reward} if isinstance(reward, dict) else {"reward": reward}


def number_of(value: Any, what: str, expected: str = NUMBER) -> float:
    """``value`` as a finite float. ``what`` it is and what was ``expected`` are for the error.

    Raises: UnscoredError; MemoryError of the value's own code, which is not about the value.
    """
    advice = ""
    try:
        refusal = _refusal(value)
        number = float(value) if refusal is None else math.nan
        advice = refusal or ""
    except MemoryError:
        raise
    except OverflowError:
        number, advice = math.inf, "a float holds up to 1.8e308"
    # The value's own code runs here. Whatever it raises, even SystemExit, is a bad reward and must not end the process.
    except BaseException as error:
        raise _refused(what, value, expected, f"reading it raised {described(error)}") from error
    if not math.isfinite(number):
        raise _refused(what, value, expected, advice)
    return number


def require_count(num_components: int) -> None:
    """Raises: UnscoredError when a reward may not have so many components."""
    if num_components > MAX_COMPONENTS:
        raise UnscoredError(
            "bad_component",
            f"the reward has {num_components} components, {MAX_COMPONENTS} allowed (MAX_COMPONENTS): return the sum of some",
        )


def _name_of(name: Any) -> str:
    if not isinstance(name, str) or COMPONENT_NAME.fullmatch(name) is None:
        raise UnscoredError(
            "bad_component",
            f"a component of the reward is called {_shown(name)}: a name is text of 1 to 64 letters, digits, _, . and -, "
            "and begins with a letter, a digit or _",
        )
    return str.__str__(name)


def _refusal(value: Any) -> "str | None":
    """Why ``float`` must not read the value: advice, or "" where there is none. None: it may."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        sizes = tuple(islice(shape, MAX_DIMENSIONS))
        if sizes != ():
            return f"it has shape {sizes}, so return one number of it, such as x.mean() or x[0]"
        # float() would take an array of text, or drop an imaginary part. So look at the element.
        value = value.item() if hasattr(value, "item") else value
    is_number = hasattr(type(value), "__float__") and not isinstance(value, _NEVER_NUMBERS)
    return None if is_number else ""


def _refused(what: str, value: Any, expected: str, advice: str) -> UnscoredError:
    return UnscoredError("not_finite", f"{what} is {_shown(value)}: {expected}" + (f"; {advice}" if advice else ""))


def _shown(value: Any) -> str:
    """The value in few characters, with its type: "nan (float)"."""
    kind = kind_of(value)
    try:
        text = " ".join(_SHORT.repr(value).split())
    except MemoryError:
        raise
    # The user's repr may raise anything, and an int can have more digits than Python prints.
    except BaseException:  # noqa: BLE001
        return f"an object of type {kind}"
    text = text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
    return f"{text} ({kind})"
