"""Mathematics that is graded: what an answer is, and whether another is the same. Needs no symbolic algebra.

The reward job is ``gspo_services.tasks.reward_worker.maths.grading:grade_answer``.
"""

from gspo_services.tasks.reward_worker.maths.golds import (
    MAX_ANSWER_CHARS,
    GoldForm,
    GoldKind,
    fault_of,
    gold_kind,
    integer_in,
    is_mathematics,
    is_same_vote,
    vote_of,
)
from gspo_services.tasks.reward_worker.maths.said_again import said_again

GRADE_ANSWER = "gspo_services.tasks.reward_worker.maths.grading:grade_answer"

__all__ = [
    "GRADE_ANSWER",
    "MAX_ANSWER_CHARS",
    "GoldForm",
    "GoldKind",
    "fault_of",
    "gold_kind",
    "integer_in",
    "is_mathematics",
    "is_same_vote",
    "said_again",
    "vote_of",
]
