"""Measures of a set of trajectories for metrics.jsonl: how long their answers are, and how sure their mean reward is."""

import math
from collections.abc import Sequence
from typing import Final

from services.broker.rows import LengthStats, TrajectoryRow

_SHARE: Final = 0.95


def length_stats(rows: Sequence[TrajectoryRow]) -> LengthStats:
    """Lengths of at least one trajectory, in the tokens that the policy sampled for it."""
    lengths = sorted(row.num_action_tokens for row in rows)
    return LengthStats(
        mean=sum(lengths) / len(lengths),
        p95=lengths[math.ceil(_SHARE * len(lengths)) - 1],
        max=lengths[-1],
        cut_off=sum(row.finish_reason == "length" for row in rows) / len(rows),
    )


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of independent ``values``; None for fewer than two."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))
