"""The environment of mathematics, how rows of questions with answers are read, and what both share with ``dataset``."""

from gspo_services.tasks.environments.maths.conventions import AUTO, marker_in, messages_of
from gspo_services.tasks.environments.maths.environment import Mathematics, MathOptions
from gspo_services.tasks.environments.maths.final_answer import said_answer, stated_answer
from gspo_services.tasks.environments.maths.gold_text import Gold
from gspo_services.tasks.environments.maths.golds import (
    AnswerForms,
    ComparesAnswers,
    Questions,
    ReadGold,
    forms_of,
    golds_of,
    questions_said_again,
    tasks_of_questions,
    vote_in,
)
from gspo_services.tasks.environments.maths.layouts import (
    GSM8K_MARKER,
    LAST_MESSAGE,
    Columns,
    QuestionLayout,
    layout_of,
    roles_of,
    value_at,
)
from gspo_services.tasks.environments.maths.rows import TYPE_KEYS, read_question, typed_by_row

__all__ = [
    "AUTO",
    "GSM8K_MARKER",
    "LAST_MESSAGE",
    "TYPE_KEYS",
    "AnswerForms",
    "Columns",
    "ComparesAnswers",
    "Gold",
    "MathOptions",
    "Mathematics",
    "QuestionLayout",
    "Questions",
    "ReadGold",
    "forms_of",
    "golds_of",
    "layout_of",
    "marker_in",
    "messages_of",
    "questions_said_again",
    "read_question",
    "roles_of",
    "said_answer",
    "stated_answer",
    "tasks_of_questions",
    "typed_by_row",
    "value_at",
    "vote_in",
]
