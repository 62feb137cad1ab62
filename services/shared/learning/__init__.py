"""Whether a run learns, from its lines of metrics.jsonl: what keeps it from it, and by how much the reward rose. Pure."""

from gspo_services.shared.learning.findings import BOUNDS, FINDINGS, Bound, FindingName, LearningFinding, Row
from gspo_services.shared.learning.outcome import LearningOutcome, Tasks, paired
from gspo_services.shared.learning.rules import NoSignal, is_silent, silence
from gspo_services.shared.learning.watch import LearningWatch, counted_components, watched

__all__ = [
    "BOUNDS",
    "FINDINGS",
    "Bound",
    "FindingName",
    "LearningFinding",
    "LearningOutcome",
    "LearningWatch",
    "NoSignal",
    "Row",
    "Tasks",
    "counted_components",
    "is_silent",
    "paired",
    "silence",
    "watched",
]
