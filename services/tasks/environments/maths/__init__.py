"""Mathematics: the environment ``math``, and what it shares with ``dataset``."""

from gspo_services.tasks.environments.maths.answers import last_boxed, said_answer, stated_answer
from gspo_services.tasks.environments.maths.environment import Mathematics, MathOptions
from gspo_services.tasks.environments.maths.golds import AnswerForms, ComparesAnswers, GoldCheck, forms_of

__all__ = [
    "AnswerForms",
    "ComparesAnswers",
    "GoldCheck",
    "MathOptions",
    "Mathematics",
    "forms_of",
    "last_boxed",
    "said_answer",
    "stated_answer",
]
