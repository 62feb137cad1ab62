"""Rewards of whole groups: how a function is called with all answers of a task, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gspo_services.tasks.worker.reward_value import UnscoredError, value_of

OPTIONAL = "rewards"
"""The argument that a function gets only if it has such a parameter."""
_UNORDERED = (str, bytes, bytearray, Mapping, set, frozenset)


def require_comparison(path: str, function: Callable[..., Any]) -> None:
    """Raises: ValueError when ``function``, at ``path``, cannot be called with the answers of a group."""
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(**arguments_of(function, {"completions": [], "task": {}, OPTIONAL: []}))
    except TypeError as error:
        raise ValueError(
            f'"{path}" takes {signature}: as reward.group it is called with completions and task, and with rewards if it '
            f"has that parameter ({error})"
        ) from error


def arguments_of(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments``, without the optional one if ``function`` does not take it."""
    signature = _signature(function)
    takes_it = signature is None or any(
        each.name == OPTIONAL or each.kind is each.VAR_KEYWORD for each in signature.parameters.values()
    )
    return arguments if takes_it else {name: value for name, value in arguments.items() if name != OPTIONAL}


def group_outcome(value: Any, size: int) -> dict[str, Any]:
    """What a worker tells its parent of the rewards of ``size`` answers: {"rewards": [float or {name: float}, ...]}, or
    {"failure": reason, "detail": text}."""
    expected = f"expected a list of {size}, one for each answer, of numbers or of dicts of named ones"
    try:
        listed = None if isinstance(value, _UNORDERED) else list(value)
    except TypeError:
        listed = None
    if listed is None:
        return {
            "failure": "wrong_length",
            "detail": f"reward.group returned a value of type {type(value).__name__[:100]}: {expected}",
        }
    if len(listed) != size:
        return {"failure": "wrong_length", "detail": f"reward.group returned {len(listed)} rewards: {expected}"}
    rewards = []
    for place, each in enumerate(listed):
        try:
            rewards.append(value_of(each))
        except UnscoredError as error:
            return {"failure": error.reason, "detail": f"answer {place} of {size}: {error}"}
    return {"rewards": rewards}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None: it has none that Python could tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
