"""Environments and task sets that come with the project, and processes that compute slow rewards. No torch, no sockets."""

from gspo_services.tasks.environments.generated import draw_problem
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
from gspo_services.tasks.environments.scoring import Score, score_of
from gspo_services.tasks.environments.shop import TOOLS, Shop, ShopOptions, tool_result
from gspo_services.tasks.environments.sources import MixedTasks

__all__ = [
    "ENVIRONMENTS",
    "TASK_SETS",
    "TOOLS",
    "FailureReason",
    "MixedTasks",
    "RewardPart",
    "RewardPool",
    "RewardPoolOptions",
    "RewardResult",
    "Score",
    "Shop",
    "ShopOptions",
    "create_environment",
    "create_task_set",
    "draw_problem",
    "find_environment",
    "find_task_set",
    "score_of",
    "tool_result",
]
