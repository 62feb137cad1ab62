"""What a run's metrics.jsonl says, read so that a damaged line costs that line alone."""

from gspo_services.runs.record.places import is_place, training_settings
from gspo_services.runs.record.record import (
    HeldOut,
    NoRecord,
    RunRecord,
    SetScores,
    evaluation_of_line,
    number,
    object_of,
    read_record,
    set_scores_of_line,
)

__all__ = [
    "HeldOut",
    "NoRecord",
    "RunRecord",
    "SetScores",
    "evaluation_of_line",
    "is_place",
    "number",
    "object_of",
    "read_record",
    "set_scores_of_line",
    "training_settings",
]
