"""The environment of mathematics, how rows of questions with answers are read, and what both share with ``dataset``."""

from gspo_services.tasks.environments.maths.conventions import AUTO, marker_in, messages_of
from gspo_services.tasks.environments.maths.environment import Mathematics, MathOptions
from gspo_services.tasks.environments.maths.final_answer import said_answer, stated_answer
from gspo_services.tasks.environments.maths.gold_text import Gold
from gspo_services.tasks.environments.maths.golds import (
    AnswerForms,
    ComparesAnswers,
    Questions,
    forms_of,
    golds_of,
    questions_said_again,
    tasks_of_questions,
)
from gspo_services.tasks.environments.maths.layouts import (
    GSM8K_MARKER,
    LAST_MESSAGE,
    Columns,
    QuestionLayout,
    layout_of,
    value_at,
)
from gspo_services.tasks.environments.maths.rows import read_question

__all__ = [
    "AUTO",
    "GSM8K_MARKER",
    "LAST_MESSAGE",
    "AnswerForms",
    "Columns",
    "ComparesAnswers",
    "Gold",
    "MathOptions",
    "Mathematics",
    "QuestionLayout",
    "Questions",
    "forms_of",
    "golds_of",
    "layout_of",
    "marker_in",
    "messages_of",
    "questions_said_again",
    "read_question",
    "said_answer",
    "stated_answer",
    "tasks_of_questions",
    "value_at",
]
