"""Whether a run learns, from its lines of metrics.jsonl: what keeps it from it, and by how much the reward rose. Pure."""

from gspo_services.shared.learning.findings import BOUNDS, FINDINGS, Bound, Finding, FindingName, Row
from gspo_services.shared.learning.outcome import Outcome, Tasks, paired
from gspo_services.shared.learning.rules import Silence, is_silent, silence
from gspo_services.shared.learning.watch import LearningWatch, counted_components, watched

__all__ = [
    "BOUNDS",
    "FINDINGS",
    "Bound",
    "Finding",
    "FindingName",
    "LearningWatch",
    "Outcome",
    "Row",
    "Silence",
    "Tasks",
    "counted_components",
    "is_silent",
    "paired",
    "silence",
    "watched",
]
