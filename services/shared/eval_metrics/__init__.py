"""Computes the results of an evaluation: avg@k, pass@k, maj@k, Elo, and their intervals. Pure."""

from gspo_services.shared.eval_metrics.counting import majority_at_k, pass_at_k
from gspo_services.shared.eval_metrics.intervals import (
    Z_975,
    Interval,
    change_interval,
    difference_interval,
    mean_interval,
    share_from,
    share_interval,
    t_quantile,
)
from gspo_services.shared.eval_metrics.metrics import (
    FORMS,
    MAX_SAMPLES,
    Estimate,
    Remark,
    ScoreMetric,
    TaskSamples,
    default_metrics,
    estimate,
    metric_named,
    require_samples,
    value_of,
)
from gspo_services.shared.eval_metrics.rating import Attempts, Rating, elo_rating, expected_solved, win_probability

__all__ = [
    "FORMS",
    "MAX_SAMPLES",
    "Z_975",
    "Attempts",
    "Estimate",
    "Interval",
    "Rating",
    "Remark",
    "ScoreMetric",
    "TaskSamples",
    "change_interval",
    "default_metrics",
    "difference_interval",
    "elo_rating",
    "estimate",
    "expected_solved",
    "majority_at_k",
    "mean_interval",
    "metric_named",
    "pass_at_k",
    "require_samples",
    "share_from",
    "share_interval",
    "t_quantile",
    "value_of",
    "win_probability",
]
