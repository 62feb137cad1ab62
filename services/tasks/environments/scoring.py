"""One reward out of what a reward function or an agent returns: a number, or named components with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

UnscoredReason = Literal["not_finite", "missing_component"]


class Score(NamedTuple):
    """A reward and what it is made of."""

    reward: float
    components: dict[str, float]
    """By name, without their weights; empty for a reward that came as one number."""


class UnscoredError(ValueError):
    """There is no reward in what was returned."""

    def __init__(self, reason: UnscoredReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def score_of(value: float | Mapping[str, float], weights: Mapping[str, float] | None) -> Score:
    """The weighted sum of components, or the number itself.

    Without ``weights`` each component counts once. With them each weighted component must be there, and one without a weight
    is reported and does not count. Raises: UnscoredError.
    """
    if not isinstance(value, Mapping):
        if weights:
            raise UnscoredError("missing_component", f"the reward is one number; components with weights: {_named(weights)}")
        return Score(_finite("the reward", value), {})
    components = {name: _finite(f'component "{name}" of the reward', part) for name, part in value.items()}
    if not components:
        raise UnscoredError("missing_component", "the reward has no components")
    counted = dict.fromkeys(components, 1.0) if weights is None else weights
    missing = [name for name in counted if name not in components]
    if missing:
        raise UnscoredError("missing_component", f"the reward lacks {_named(missing)}; it has {_named(components)}")
    reward = math.fsum(weight * components[name] for name, weight in counted.items())
    return Score(_finite("the weighted sum of the reward's components", reward), components)


def _finite(what: str, value: object) -> float:
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    shown = repr(value)[:200] if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
    raise UnscoredError("not_finite", f"{what} is {shown}: expected a finite number")


def _named(names: Mapping[str, float] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
