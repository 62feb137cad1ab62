"""What an evaluation says, by arithmetic alone: avg@k, pass@k, maj@k, Elo, and their intervals. Pure."""

from services.scores.counting import majority_at_k, pass_at_k
from services.scores.intervals import Interval, difference_interval, mean_interval, share_interval, t_quantile
from services.scores.metrics import (
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
from services.scores.rating import Attempts, Rating, elo_rating, expected_solved, win_probability

__all__ = [
    "FORMS",
    "MAX_SAMPLES",
    "Attempts",
    "Estimate",
    "Interval",
    "Rating",
    "Remark",
    "ScoreMetric",
    "TaskSamples",
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
    "share_interval",
    "t_quantile",
    "value_of",
    "win_probability",
]
