"""Rows of metrics.jsonl as typed events."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_services.runs.metrics.rows import Row, count, number
from gspo_services.shared.eval_metrics import Z_975


@dataclass(frozen=True, kw_only=True)
class BatchMetrics:
    """One trained batch."""

    index: int
    policy_version: int
    """The version that it made; 0 if it was trained again and made none."""
    reward: float
    """Mean reward of its trajectories. NaN, as all measures here, if the line has none."""
    lag: float
    """Mean lag of its trajectories, in policy versions."""
    num_tokens: float
    time_s: float
    """Seconds since the run began, without the time in which it did not run."""
    measures: Mapping[str, float]
    """Every number of the line by its name, such as ``clip_fraction/all``."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One finished evaluation on held-out tasks."""

    policy_version: int
    batch: int
    """Batches that the evaluated weights were trained on."""
    reward: float
    """Mean over the tasks that finished: ``eval/reward``."""
    num_finished: int
    num_failed: int
    time_s: float
    """Seconds since the run began, without the time in which it did not run; NaN if the line does not say."""
    score: float
    """The score that chooses the best checkpoint: ``evaluation.best_by``, or the reward."""
    metric: str = "eval/reward"
    """The name of the score."""
    half_interval: float = math.nan
    """Half of the 95 % interval around the reward; NaN if only one task was finished."""
    versions_newer: float = math.nan
    """How much newer than the evaluated weights its tokens are on average."""


@dataclass(frozen=True, kw_only=True)
class SetScores:
    """The result of one named set."""

    name: str
    policy_version: int
    batch: int
    num_failed: int
    metrics: dict[str, tuple[float, float, float]]
    """Value, and the ends of its 95 % interval, by name; NaN if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Any other line: a group dropped, a batch quarantined or requeued, and so on."""

    event: str
    time_s: float
    values: Mapping[str, Any]
    """The whole line."""


Event = BatchMetrics | HeldOut | RunEvent
"""What a run tells of itself while it goes on."""


def typed(row: Row) -> Event | None:
    """Parse a row as an event; None for an evaluation in which no task was finished."""
    if row["event"] == "eval":
        return held_out(row)
    if row["event"] == "batch":
        return batch_metrics(row)
    return RunEvent(event=row["event"], time_s=number(row, "time_s"), values=row)


def batch_metrics(row: Row) -> BatchMetrics:
    """The row of a trained batch."""
    values = {name: number(row, name) for name in row if name not in ("event", "line")}
    measures = {name: value for name, value in values.items() if not math.isnan(value)}
    return BatchMetrics(
        index=row["batch"],
        policy_version=count(row, "policy_version") or 0,
        reward=measures.get("train/reward", math.nan),
        lag=measures.get("lag/mean", math.nan),
        num_tokens=measures.get("num_tokens", math.nan),
        time_s=measures.get("time_s", math.nan),
        measures=measures,
    )


def held_out(row: Row) -> HeldOut | None:
    """Parse the row of an evaluation; None when no task was finished."""
    reward, score = number(row, "eval/reward"), number(row, "eval/score")
    if math.isnan(reward):
        return None
    return HeldOut(
        policy_version=row["policy_version"],
        batch=row["batch"],
        reward=reward,
        num_finished=count(row, "num_finished") or 0,
        num_failed=count(row, "num_failed") or 0,
        time_s=number(row, "time_s"),
        score=reward if math.isnan(score) else score,
        metric="eval/reward" if math.isnan(score) else f"eval/{row.get('set')}/{row.get('metric')}",
        half_interval=Z_975 * number(row, "eval/reward_error"),
        versions_newer=number(row, "eval/versions_newer"),
    )


def set_scores(row: Row) -> SetScores:
    """Parse the row of a named set."""
    prefix = f"eval/{row['set']}/"
    names = [key.removeprefix(prefix).removesuffix("_low") for key in row if key.startswith(prefix) and key.endswith("_low")]
    return SetScores(
        name=row["set"],
        policy_version=row["policy_version"],
        batch=row["batch"],
        num_failed=count(row, "num_failed") or 0,
        metrics={
            name: (number(row, prefix + name), number(row, f"{prefix}{name}_low"), number(row, f"{prefix}{name}_high"))
            for name in names
        },
    )


def _score(evaluation: HeldOut) -> float:
    return evaluation.score


def best_evaluation(evaluations: Iterable[HeldOut], value: Callable[[HeldOut], float] = _score) -> HeldOut | None:
    """Return the one with the highest ``value``, and of equal ones the earliest: it is closest to the starting model."""
    return min(evaluations, key=lambda each: (-value(each), each.batch), default=None)
