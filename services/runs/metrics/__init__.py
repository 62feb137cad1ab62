"""metrics.jsonl of a run: read whole or followed, as rows, typed events and curves. A damaged line costs only itself."""

from gspo_services.runs.metrics.events import (
    BatchMetrics,
    Event,
    HeldOut,
    RunEvent,
    SetScores,
    batch_metrics,
    best_evaluation,
    held_out,
    set_scores,
    typed,
)
from gspo_services.runs.metrics.follower import Damage, MetricsFollower
from gspo_services.runs.metrics.pace import BatchPace
from gspo_services.runs.metrics.rows import Row, column, known, number, or_none
from gspo_services.runs.metrics.run_metrics import NoMetrics, RunMetrics, learning_watch, read_metrics
from gspo_services.runs.metrics.smoothing import mean, quantile, rolling, window

__all__ = [
    "BatchMetrics",
    "BatchPace",
    "Damage",
    "Event",
    "HeldOut",
    "MetricsFollower",
    "NoMetrics",
    "Row",
    "RunEvent",
    "RunMetrics",
    "SetScores",
    "batch_metrics",
    "best_evaluation",
    "column",
    "held_out",
    "known",
    "learning_watch",
    "mean",
    "number",
    "or_none",
    "quantile",
    "read_metrics",
    "rolling",
    "set_scores",
    "typed",
    "window",
]
