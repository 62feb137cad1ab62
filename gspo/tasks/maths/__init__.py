"""Mathematics that is graded: what an answer is, and whether another is the same. Needs no symbolic algebra.

The reward job is ``gspo.tasks.grading:grade_answer``.
"""

from gspo.tasks.maths.chosen import chosen
from gspo.tasks.maths.countdown import countdown_gold
from gspo.tasks.maths.golds import (
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
from gspo.tasks.maths.said_again import said_again

GRADE_ANSWER = "gspo.tasks.grading:grade_answer"

__all__ = [
    "GRADE_ANSWER",
    "MAX_ANSWER_CHARS",
    "GoldForm",
    "GoldKind",
    "chosen",
    "countdown_gold",
    "fault_of",
    "gold_kind",
    "integer_in",
    "is_mathematics",
    "is_same_vote",
    "said_again",
    "vote_of",
]
