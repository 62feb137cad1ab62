"""Measures of trajectories for metrics.jsonl: how they were sampled, how long their answers are, and how certain their
mean reward is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, get_args

from gspo_services.broker.rows import BatchRow, GroupRow, LengthStats, TrajectoryRow

_SHARE: Final = 0.95
Difficulty = Literal["new", "never", "seldom", "often", "always"]
"""A task's difficulty, from its last batched group: it was not sampled before; none of the group's trajectories passed
(had a positive reward); fewer than half; half or more; all."""
DIFFICULTIES: Final[tuple[Difficulty, ...]] = get_args(Difficulty)


def length_stats(rows: Sequence[TrajectoryRow]) -> LengthStats:
    """Lengths of at least one trajectory, in the tokens that the policy sampled for it."""
    lengths = sorted(row.num_action_tokens for row in rows)
    return LengthStats(
        mean=sum(lengths) / len(lengths),
        p95=lengths[math.ceil(_SHARE * len(lengths)) - 1],
        max=lengths[-1],
        cut_off=sum(row.finish_reason == "length" for row in rows) / len(rows),
    )


def sampling_line(batch: BatchRow) -> dict[str, float]:
    """How the batch's groups were sampled: the mean temperature and the largest limits, because groups that began before and
    after a change can share a batch; and the clip widths, where these are scheduled.
    """
    samplings = batch.samplings
    line = {
        "sampling/temperature": sum(each.temperature for each in samplings) / len(samplings),
        "sampling/max_turn_tokens": max(each.max_turn_tokens for each in samplings),
        "sampling/max_tokens": max(each.max_tokens for each in samplings),
    }
    widths = {"clip/eps_low": batch.values.eps_low, "clip/eps_high": batch.values.eps_high}
    return line | {name: width for name, width in widths.items() if width is not None}


def batch_report(batch: BatchRow) -> dict[str, float | None]:
    """By name as in metrics.jsonl: counts begin with ``num_``; of largest values the last part is or begins with ``max``."""
    stats = batch.stats
    return {
        "num_tokens": stats.num_tokens,
        "num_action_tokens": stats.num_action_tokens,
        "num_trajectories": stats.num_trajectories,
        "num_zero_advantage_groups": stats.num_zero_advantage_groups,
        "num_filtered_groups": stats.num_filtered_groups,
        "num_filtered_tokens": stats.num_filtered_tokens,
        "train/reward": stats.mean_reward,
        "lag/mean": stats.mean_lag,
        "lag/max": stats.max_lag,
        **{f"train/reward/{name}": mean for name, mean in stats.components.items()},
        **{f"adapter/{name}/reward": mean for name, mean in stats.adapters.items()},
        **stats.lengths.line(""),
        **sampling_line(batch),
        **{f"pass_rate/{name}": rate for name, rate in stats.pass_rates.items()},
    }


def passed(members: Sequence[TrajectoryRow]) -> float:
    """The share of a group's trajectories that passed."""
    return sum(row.reward > 0 for row in members) / len(members)


def difficulty(before: float | None) -> Difficulty:
    """Return the difficulty of a task whose last group passed with the share ``before``; None: no group yet."""
    if before is None:
        return "new"
    if before in (0, 1):
        return "always" if before else "never"
    return "seldom" if before < 0.5 else "often"


def pass_rates(groups: Sequence[tuple[GroupRow, Sequence[TrajectoryRow]]], before: Mapping[int, float]) -> dict[str, float]:
    """The mean share that passed of ``groups``, by difficulty; ``before``: how each task did the last time."""
    found: dict[Difficulty, list[float]] = {}
    for group, members in groups:
        found.setdefault(difficulty(before.get(group.task_index)), []).append(passed(members))
    return {name: sum(found[name]) / len(found[name]) for name in DIFFICULTIES if name in found}


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean of independent ``values``; None for fewer than two."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))
