"""Environments that come with the project, and processes that compute slow rewards. No torch, no sockets."""

from services.environments.registry import ENVIRONMENTS, create_environment, find_environment
from services.environments.reward_pool import FailureReason, RewardPool, RewardPoolOptions
from services.environments.scoring import Score, UnscoredError, UnscoredReason, score_of

__all__ = [
    "ENVIRONMENTS",
    "FailureReason",
    "RewardPool",
    "RewardPoolOptions",
    "Score",
    "UnscoredError",
    "UnscoredReason",
    "create_environment",
    "find_environment",
    "score_of",
]
