"""Environments and task sets that come with the project, and processes that compute slow rewards. No torch, no sockets."""

from gspo_services.tasks.environments.generated import draw_problem
from gspo_services.tasks.environments.layouts import program_row
from gspo_services.tasks.environments.maths import (
    LAST_MESSAGE,
    AnswerForms,
    Columns,
    ComparesAnswers,
    QuestionLayout,
    forms_of,
    layout_of,
    questions_said_again,
    read_question,
    roles_of,
    value_at,
)
from gspo_services.tasks.environments.registry import (
    ENVIRONMENTS,
    TASK_SETS,
    create_environment,
    create_task_set,
    find_environment,
    find_task_set,
)
from gspo_services.tasks.environments.reward_pool import FailureReason, RewardPool, RewardPoolOptions
from gspo_services.tasks.environments.reward_results import RewardPart, RewardResult
from gspo_services.tasks.environments.scoring import (
    DoorReason,
    Score,
    reason_of,
    require_takeable,
    score_of,
    sum_of,
    through_the_door,
)
from gspo_services.tasks.environments.shop import TOOLS, Shop, ShopOptions, tool_result
from gspo_services.tasks.environments.sources import (
    READING,
    Accounting,
    ColumnUse,
    MixedTasks,
    as_mapping,
    column_of,
    files_of,
    rows_of,
)

__all__ = [
    "ENVIRONMENTS",
    "LAST_MESSAGE",
    "READING",
    "TASK_SETS",
    "TOOLS",
    "Accounting",
    "AnswerForms",
    "ColumnUse",
    "Columns",
    "ComparesAnswers",
    "DoorReason",
    "FailureReason",
    "MixedTasks",
    "QuestionLayout",
    "RewardPart",
    "RewardPool",
    "RewardPoolOptions",
    "RewardResult",
    "Score",
    "Shop",
    "ShopOptions",
    "as_mapping",
    "column_of",
    "create_environment",
    "create_task_set",
    "draw_problem",
    "files_of",
    "find_environment",
    "find_task_set",
    "forms_of",
    "layout_of",
    "program_row",
    "questions_said_again",
    "read_question",
    "reason_of",
    "require_takeable",
    "roles_of",
    "rows_of",
    "score_of",
    "sum_of",
    "through_the_door",
    "tool_result",
    "value_at",
]
