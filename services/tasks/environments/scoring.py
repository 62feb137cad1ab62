"""One reward out of what a reward function or an agent returns: a number, or named components with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gspo_services.tasks.worker.reward_value import UnscoredError


class Score(NamedTuple):
    """A reward and what it is made of."""

    reward: float
    components: dict[str, float]
    """By name, without their weights; empty for a reward that came as one number."""


def score_of(value: float | dict[str, float], weights: Mapping[str, float] | None) -> Score:
    """The weighted sum of components, or the number itself. ``value`` has been read by ``reward_value.value_of``.

    Without ``weights`` each component counts once. With them each weighted component must be there, and one without a weight
    is reported and does not count. Raises: UnscoredError, also when the sum is not finite.
    """
    if not isinstance(value, dict):
        if weights:
            raise UnscoredError("missing_component", f"the reward is one number; components with weights: {_named(weights)}")
        return Score(value, {})
    counted = dict.fromkeys(value, 1.0) if weights is None else weights
    missing = [name for name in counted if name not in value]
    if missing:
        raise UnscoredError("missing_component", f"the reward lacks {_named(missing)}; it has {_named(value)}")
    try:
        reward = math.fsum(weight * value[name] for name, weight in counted.items())
    except (OverflowError, ValueError):
        # It is too large on the way, or has infinities of both signs.
        reward = math.nan
    if not math.isfinite(reward):
        raise UnscoredError(
            "not_finite", f"the weighted sum of the reward's components is {reward}: give smaller components or weights"
        )
    return Score(reward, value)


def _named(names: Mapping[str, float] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
