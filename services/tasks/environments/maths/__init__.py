"""The environment of mathematics, and how rows of questions with answers are read."""

from gspo_services.tasks.environments.maths.conventions import AUTO, marker_in, system_prompt_of
from gspo_services.tasks.environments.maths.environment import Mathematics, MathOptions
from gspo_services.tasks.environments.maths.gold_text import Gold
from gspo_services.tasks.environments.maths.layouts import GSM8K_MARKER, LAST_MESSAGE, Columns, layout_of, value_at
from gspo_services.tasks.environments.maths.rows import read_question

__all__ = [
    "AUTO",
    "GSM8K_MARKER",
    "LAST_MESSAGE",
    "Columns",
    "Gold",
    "MathOptions",
    "Mathematics",
    "layout_of",
    "marker_in",
    "read_question",
    "system_prompt_of",
    "value_at",
]
